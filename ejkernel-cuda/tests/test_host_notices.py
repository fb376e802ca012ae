"""Mutation tests of the host's stand-ins for loads, MMAs and barriers: they notice mistakes planted in kernels."""

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
    pytest.mark.unsampled,  # a kernel change can make any mutant survive
    pytest.mark.skipif(host_kernels.missing() is not None, reason=str(host_kernels.missing())),
]
IN_ATTENTION = {
    "nothing": ("", ""),
    "keys are released before they are read": (
        "      wgmma_wait_group<1>();\n      wgmma_fence_operand(s);\n      hidden",
        "      release_keys(done + 1);\n      wgmma_wait_group<1>();\n      wgmma_fence_operand(s);\n      hidden",
    ),
    "values are released before they are read": (
        "      wgmma_wait_group<0>();\n      wgmma_fence_operand(o);\n      wgmma_fence_operand(s);\n      release_values(done);",
        "      release_values(done);\n      wgmma_wait_group<0>();\n      wgmma_fence_operand(o);\n      wgmma_fence_operand(s);",
    ),
    "scores are not waited for": ("      wgmma_wait_group<1>();\n", ""),
    "the output buffer is overwritten while TMA reads it": (
        "    if (S::kSeparateOut && thread() == 0) tma_store_wait_group_read();\n",
        "",
    ),
    "no consumer starts the ping-pong": ("    if (consumer == S::kConsumers - 1) ping_pong_arrive();", ""),
}
IN_ROWS = {
    "a slot of the cluster exchange is reused too soon": (
        "constexpr int kClusterMbarriers = 4;",
        "constexpr int kClusterMbarriers = 2;",
    ),
    "statistics of other blocks are not waited for": (
        "    cluster_mbarrier_wait(mbarriers + index, received++ / kClusterMbarriers % 2);",
        "    ++received;",
    ),
}
IN_TMA = {
    "keys and values are not waited for": (
        "      mbarrier_wait(&barriers.full[state.index], state.phase);\n      int bits = 0;",
        "      int bits = 0;",
    ),
    "a stage is released before it is read": (
        "        this->update(queries, factor, keys, values, visible_keys);\n      }\n      release();",
        "      }\n      release();\n      if (visible_keys) this->update(queries, factor, keys, values, visible_keys);",
    ),
    "stages are filled while others read them": (
        "      mbarrier_wait(&barriers.empty[state.index], state.phase ^ 1);\n      int bytes = 0;",
        "      int bytes = 0;",
    ),
    "masked values are not zeroed": (
        "        if (visible_keys != Layout::kAllVisible) zero_masked_values(values, visible_keys);\n",
        "",
    ),
    "expect_tx gets fewer bytes than are loaded": ("    return 2 * __popc(leaders)", "    return __popc(leaders)"),
}
IN_PROMPTS = {
    "nothing": ("", ""),
    "pages outside of the cache are seen": ("        hidden_keys[stage] = hidden;", "        hidden_keys[stage] = 0;"),
    "values are loaded into a stage that is read": (
        "      mbarrier_wait(shared.value_empty(stage), flash_attention::parity_of<S>(done) ^ 1);\n",
        "",
    ),
    "a block has another request's keys": ("* all.requests) + block.request;", "* all.requests) + 0 * block.request;"),
}
MISTAKES = {
    **{f"attention: {name}": ("flash_attention/kernels.cuh", *change) for name, change in IN_ATTENTION.items()},
    **{f"rows: {name}": ("reduce.cuh", *change) for name, change in IN_ROWS.items()},
    **{f"prompts: {name}": ("paged_prefill/kernels.cuh", *change) for name, change in IN_PROMPTS.items()},
    **{f"tma: {name}": ("paged_attention/tma_pages.cuh", *change) for name, change in IN_TMA.items()},
}
RACES = {
    "nothing": ("paged_attention/kernels.cuh", "", ""),
    "warps overwrite ring buffers that others read": (
        "paged_attention/online_softmax.cuh",
        "    layout.sync_consumers();  // all warps have read the ring buffers\n",
        "",
    ),
    "partial results of other warps are not waited for": (
        "paged_attention/combine.cuh",
        "    shared.warps[warp][lane] = sum;\n    __syncthreads();\n",
        "    shared.warps[warp][lane] = sum;\n",
    ),
    "nothing, with TMA": ("paged_attention/tma_pages.cuh", "", ""),
    "one warp arrives for all": (
        "paged_attention/tma_pages.cuh",
        "    if (lane == 0) mbarrier_arrive(&barriers.empty[state.index]);",
        "    if (threadIdx.x == 0)\n      for (int i = 0; i < kWarps; ++i) mbarrier_arrive(&barriers.empty[state.index]);",
    ),
}
PAGES = """
import jax, host_calls, test_paged_attention_on_host as own
jax.ffi.ffi_call, own.kernel.handler = host_calls.answered, lambda name: name
made = own.problem(((1, 700),), heads=8, key_heads=4, page_size=16, head_size=128, stored="int8")
for workers in (60, 20, 1):  # several warps combine a row, many workers, one per tile
    own.check(made.call, made.inputs, own.config.PagedAttentionConfig(2, workers, 2))
print("right")
"""
ATTENTION = """
import numpy as np, host_attention, test_attention_on_host as own
rng = np.random.default_rng(3)
band, knobs = own.Band(own.FAR, own.FAR), {"scale": 0.09, "ping_pong": True, "persistent": True}
for keys, ctas in ((430, {"sms": 1}), (1000, {"sms": 3, "split_kv_ctas": 3})):
    query, key, value = (own.random(rng, 1, n, heads, 128, dtype="bfloat16") for n, heads in ((400, 2), (keys, 1), (keys, 1)))
    found = host_attention.forward(query, key, value, band, **knobs, **ctas)
    own.compare(found, own.exact(query, key, value, band, 0.09), "bfloat16")
print("right")
"""


ROWS = """
import numpy as np, test_rows_on_host as own
problem = own.Norm("layer_norm", "bfloat16", 1800, 0)
out, mean, rstd = problem.forward(True, 64, 4, 4, 3, workers=1)
wanted = problem.outputs
# Any block of a cluster may run ahead. All blocks write columns of `out`, only the first one writes statistics.
np.testing.assert_allclose(own.relative(out, wanted.out), 0, atol=own.TOLERANCE["bfloat16"])
np.testing.assert_allclose(mean, wanted.mean, 1e-5)
np.testing.assert_allclose(rstd, wanted.rstd, 1e-5)
print("right")
"""


TMA = """
import jax, host_calls, test_paged_attention_on_host as own
jax.ffi.ffi_call, own.kernel.handler = host_calls.answered, lambda name: name
made = own.tma_problem(((1, 700), (1, 45)))
for workers in (1, 5):
    own.check(made.call, made.inputs, own.tma_config(2, workers))
print("right")
"""


PROMPTS = """
import jax, jax.numpy as jnp, numpy as np, host_calls, test_paged_prefill_on_host as own
jax.ffi.ffi_call, own.kernel.handler = host_calls.answered, lambda name: name
made = own.problem(((20, 700), (9, 300)))
tables = np.array(made.inputs.block_tables)
tables[0, 0, [0, 30]] = -1
own.check(made.call, made.inputs._replace(block_tables=jnp.asarray(tables)))
print("right")
"""


def changed(folder: pathlib.Path, file: str, right: str, wrong: str) -> dict[str, str]:
    """The environment of a program that compiles the kernels with a planted mistake."""
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
    if right:
        environment["TSAN_OPTIONS"] += " halt_on_error=1"  # the first race suffices
    program = TMA if file.endswith("tma_pages.cuh") else PAGES
    done = subprocess.run(host_races.command("-c", program), env=environment, capture_output=True, text=True, check=False)
    if not right:
        assert done.stdout == "right\n" and done.returncode == 0, done.stderr[-3000:]
    else:
        assert "data race" in done.stderr and file in done.stderr, done.stderr[-3000:]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(mistake, tmp_path):
    """As wrong results, as a deadlock, or as a broken rule of an instruction."""
    file, right, wrong = MISTAKES[mistake]
    environment = {**os.environ, **changed(tmp_path, file, right, wrong)}
    program = {"rows": ROWS, "tma": TMA, "attention": ATTENTION, "prompts": PROMPTS}[mistake.split(":")[0]]
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    if right:
        assert done.returncode != 0 and "right" not in done.stdout
        assert "Not equal" in done.stderr or "assert" in done.stderr or done.returncode < 0, done.stderr
    else:
        assert done.stdout == "right\n", done.stderr
