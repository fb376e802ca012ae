"""What the host's stand-ins for copies, products and barriers are worth: mistakes in the attention kernel do not pass unnoticed."""

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
MISTAKES = {
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
PROGRAM = """
import numpy as np, host_attention, test_attention_on_host as own
rng = np.random.default_rng(3)
query, key, value = (own.random(rng, 1, n, heads, 128, dtype="bfloat16") for n, heads in ((400, 2), (430, 1), (430, 1)))
band = own.Band(own.FAR, own.FAR)
knobs = {"scale": 0.09, "take_turns": True, "persistent": True, "processors": 1}
own.compare(host_attention.forward(query, key, value, band, **knobs), own.exact(query, key, value, band, 0.09), "bfloat16")
print("right")
"""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(mistake, tmp_path):
    """By wrong numbers, or because threads wait for each other, or a rule of an instruction is broken."""
    csrc = shutil.copytree(HERE.parent / "csrc", tmp_path / "csrc")
    kernel, (right, wrong) = csrc / "flash_attention" / "kernels.cuh", MISTAKES[mistake]
    text = kernel.read_text()
    assert not right or text.count(right) == 1
    kernel.write_text(text.replace(right, wrong) if right else text)
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "EJKERNEL_HOST_CSRC": str(csrc), "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    if right:
        assert done.returncode != 0 and "right" not in done.stdout
        assert "Not equal" in done.stderr or "assert" in done.stderr or done.returncode < 0, done.stderr
    else:
        assert done.stdout == "right\n", done.stderr
