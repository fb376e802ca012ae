"""What the host's stand-ins for copies, products and barriers are worth: mistakes in kernels do not pass unnoticed."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import host_kernels
import pytest

HERE = pathlib.Path(__file__).parent
pytestmark = pytest.mark.skipif(host_kernels.missing() is not None, reason=str(host_kernels.missing()))
IN_ATTENTION = {
    "nothing": ("", ""),
    "keys are left before they are read": (
        "      await_products<1>();\n      settle(s);\n      leave_keys(done + 1);",
        "      leave_keys(done + 1);\n      await_products<1>();\n      settle(s);",
    ),
    "values are left before they are read": (
        "      await_products<0>();\n      settle(o);\n      settle(s);\n      leave_values(done);",
        "      leave_values(done);\n      await_products<0>();\n      settle(o);\n      settle(s);",
    ),
    "scores are not waited for": ("      await_products<1>();\n", ""),
    "output goes where the last one still lies": ("    if (S::kOutApart && thread() == 0) await_stores_read();\n", ""),
    "nobody has the first turn": ("    if (consumer == S::kConsumers - 1) pass_turn();", ""),
}
IN_ROWS = {
    "a place of the cluster's numbers is used again too soon": (
        "constexpr int kMailboxes = 4;",
        "constexpr int kMailboxes = 2;",
    ),
    "numbers of other blocks are not waited for": (
        "    wait_for_mail(mailboxes + box, received++ / kMailboxes % 2);",
        "    ++received;",
    ),
}
MISTAKES = {
    **{f"attention: {name}": ("flash_attention/kernels.cuh", *change) for name, change in IN_ATTENTION.items()},
    **{f"rows: {name}": ("reduce.cuh", *change) for name, change in IN_ROWS.items()},
}
ATTENTION = """
import numpy as np, host_attention, test_attention_on_host as own
rng = np.random.default_rng(3)
query, key, value = (own.random(rng, 1, n, heads, 128, dtype="bfloat16") for n, heads in ((400, 2), (430, 1), (430, 1)))
band = own.Band(own.FAR, own.FAR)
knobs = {"scale": 0.09, "take_turns": True, "persistent": True, "processors": 1}
own.compare(host_attention.forward(query, key, value, band, **knobs), own.exact(query, key, value, band, 0.09), "bfloat16")
print("right")
"""


ROWS = """
import numpy as np, test_rows_on_host as own
problem = own.Norm("layer_norm", "bfloat16", 1800, 0)
out, mean, rstd = problem.forward(True, 64, 4, 4, 3, parts=1)
wanted = problem.outputs
# Any block of a cluster may be the one that runs ahead: all write parts of `out`, only the first one writes statistics.
np.testing.assert_allclose(own.relative(out, wanted.out), 0, atol=own.TOLERANCE["bfloat16"])
np.testing.assert_allclose(mean, wanted.mean, 1e-5)
np.testing.assert_allclose(rstd, wanted.rstd, 1e-5)
print("right")
"""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(mistake, tmp_path):
    """By wrong numbers, or because threads wait for each other, or a rule of an instruction is broken."""
    csrc = shutil.copytree(HERE.parent / "csrc", tmp_path / "csrc")
    file, right, wrong = MISTAKES[mistake]
    source = csrc / file
    text = source.read_text()
    assert not right or text.count(right) == 1
    source.write_text(text.replace(right, wrong) if right else text)
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "EJKERNEL_HOST_CSRC": str(csrc), "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    program = ROWS if mistake.startswith("rows") else ATTENTION
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    if right:
        assert done.returncode != 0 and "right" not in done.stdout
        assert "Not equal" in done.stderr or "assert" in done.stderr or done.returncode < 0, done.stderr
    else:
        assert done.stdout == "right\n", done.stderr
