"""What the host's stand-ins for copies, products and barriers are worth: mistakes in kernels do not pass unnoticed."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import host_kernels
import host_races
import pytest

HERE = pathlib.Path(__file__).parent
pytestmark = [
    pytest.mark.unsampled,  # which mistakes pass depends on how work is shared, and may change with any kernel
    pytest.mark.skipif(host_kernels.missing() is not None, reason=str(host_kernels.missing())),
]
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
IN_BOXES = {
    "keys and values are not waited for": (
        "      await(&ring.full[slot.number], slot.phase);\n      int known = 0;",
        "      int known = 0;",
    ),
    "a slot is left before it is read": (
        "        this->take(queries, factor, keys, values, seen);\n      }\n      leave();",
        "      }\n      leave();\n      if (seen) this->take(queries, factor, keys, values, seen);",
    ),
    "slots are filled that others read": (
        "      await(&ring.empty[slot.number], slot.phase ^ 1);\n      int bytes = 0;",
        "      int bytes = 0;",
    ),
    "values that nobody sees stay": ("        if (seen != Layout::kAllSeen) hide(values, seen);\n", ""),
    "fewer bytes are announced than come": ("    return 2 * __popc(begun)", "    return __popc(begun)"),
}
MISTAKES = {
    **{f"attention: {name}": ("flash_attention/kernels.cuh", *change) for name, change in IN_ATTENTION.items()},
    **{f"rows: {name}": ("reduce.cuh", *change) for name, change in IN_ROWS.items()},
    **{f"boxes: {name}": ("paged_attention/boxes.cuh", *change) for name, change in IN_BOXES.items()},
}
RACES = {
    "nothing": ("paged_attention/kernels.cuh", "", ""),
    "warps go on while others read their rings": (
        "paged_attention/sums.cuh",
        "    layout.meet_all();  // and all warps are done with what was there\n",
        "",
    ),
    "sums of other warps are not waited for": (
        "paged_attention/merge.cuh",
        "    notes.of_warps[warp][lane] = sum;\n    __syncthreads();\n",
        "    notes.of_warps[warp][lane] = sum;\n",
    ),
    "nothing, in boxes": ("paged_attention/boxes.cuh", "", ""),
    "one warp says that all have left": (
        "paged_attention/boxes.cuh",
        "    if (lane == 0) arrive(&ring.empty[slot.number]);",
        "    if (threadIdx.x == 0)\n      for (int i = 0; i < kWarps; ++i) arrive(&ring.empty[slot.number]);",
    ),
}
PAGES = """
import jax, host_calls, test_paged_attention_on_host as own
jax.ffi.ffi_call, own.kernel.handler = host_calls.answered, lambda name: name
made = own.problem(((1, 700),), heads=8, key_heads=4, page_size=16, head_size=128, stored="int8")
for workers in (1, 20, 60):  # a tile is one worker's, or many's; of 60, several warps merge a row
    own.check(made.call, made.inputs, own.config.PagedAttentionConfig(2, workers, 2))
print("right")
"""
ATTENTION = """
import numpy as np, host_attention, test_attention_on_host as own
rng = np.random.default_rng(3)
band, knobs = own.Band(own.FAR, own.FAR), {"scale": 0.09, "take_turns": True, "persistent": True}
for keys, programs in ((430, {"processors": 1}), (1000, {"processors": 3, "sharers": 3})):
    query, key, value = (own.random(rng, 1, n, heads, 128, dtype="bfloat16") for n, heads in ((400, 2), (keys, 1), (keys, 1)))
    found = host_attention.forward(query, key, value, band, **knobs, **programs)
    own.compare(found, own.exact(query, key, value, band, 0.09), "bfloat16")
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


BOXES = """
import jax, host_calls, test_paged_attention_on_host as own
jax.ffi.ffi_call, own.kernel.handler = host_calls.answered, lambda name: name
made = own.boxed(((1, 700), (1, 45)))
for workers in (1, 5):
    own.check(made.call, made.inputs, own.boxes(2, workers))
print("right")
"""


def changed(folder: pathlib.Path, file: str, right: str, wrong: str) -> dict[str, str]:
    """What a program needs to know to use kernels in which something is otherwise."""
    csrc = shutil.copytree(HERE.parent / "csrc", folder / "csrc")
    source = csrc / file
    text = source.read_text()
    assert not right or text.count(right) == 1
    source.write_text(text.replace(right, wrong) if right else text)
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"EJKERNEL_HOST_CSRC": str(csrc), "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}


@pytest.mark.skipif(host_races.missing() is not None, reason=str(host_races.missing()))
@pytest.mark.parametrize("mistake", RACES)
def test_races_are_noticed(mistake, tmp_path):
    file, right, wrong = RACES[mistake]
    environment = {**host_races.environment(), **changed(tmp_path, file, right, wrong)}
    program = BOXES if file.endswith("boxes.cuh") else PAGES
    done = subprocess.run(host_races.command("-c", program), env=environment, capture_output=True, text=True, check=False)
    if not right:
        assert done.stdout == "right\n" and done.returncode == 0, done.stderr[-3000:]
    else:
        assert "data race" in done.stderr and file in done.stderr, done.stderr[-3000:]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(mistake, tmp_path):
    """By wrong numbers, or because threads wait for each other, or a rule of an instruction is broken."""
    file, right, wrong = MISTAKES[mistake]
    environment = {**os.environ, **changed(tmp_path, file, right, wrong)}
    program = {"rows": ROWS, "boxes": BOXES, "attention": ATTENTION}[mistake.split(":")[0]]
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    if right:
        assert done.returncode != 0 and "right" not in done.stdout
        assert "Not equal" in done.stderr or "assert" in done.stderr or done.returncode < 0, done.stderr
    else:
        assert done.stdout == "right\n", done.stderr
