"""`lightning_indexer` in Triton on a machine without a GPU: what is chosen, in one pass and several, machine code, refusals."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.operations.lightning_indexer import reference
from ejkernel.operations.lightning_indexer.cases import arrays
from ejkernel.operations.lightning_indexer.interface import FLOAT8, OPERATION
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel_triton._capability import shared_memory_limit
from ejkernel_triton._versions import version_problem
from ejkernel_triton.lightning_indexer import capability, config
from ejkernel_triton.lightning_indexer.config import Config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton._jax_triton import intercept_launches
from ejkernel_triton.lightning_indexer import kernel

H100 = Target("gpu", "NVIDIA H100 80GB HBM3", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"compilation: {version_problem()}")
TILE = Config(block_k=16, block_q=4, num_warps=4, num_stages=2)


def bound_of(maker, dtype="float32", **options):
    made = maker(np.random.default_rng(3))
    return OPERATION.canonicalise(
        **{name: jnp.asarray(array, dtype if array.dtype == np.float32 else None) for name, array in made.items()}, **options
    )


def check(bound, chosen):
    with intercept_launches(testing.traced_call):
        got = kernel.forward(bound.call, bound.inputs, chosen).tokens
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, reference.forward(bound.call, widened(bound.inputs)).tokens)


@pytest.mark.parametrize("chosen", [TILE, dataclasses.replace(TILE, block_k=32, block_q=1)], ids=["four queries", "one"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", FLOAT8])
def test_choices_in_the_interpreter(dtype, chosen):
    """Tails of every tile, and rows that see at most k tokens, whose scores are not formed."""
    stored, other = (FLOAT8, "float32") if dtype == FLOAT8 else ("float32", dtype)
    made = arrays(6, 37, heads=3, size=20, batch=2, levels=3, lengths=(37, 12), scaled=True, stored=stored)
    check(bound_of(made, other, k=9), chosen)


@pytest.mark.parametrize("levels", [0, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_several_passes_and_some_queries_at_a_time(monkeypatch, levels, causal):
    """Three passes over 16 scores of a program each; ties across programs go to the earlier token."""
    monkeypatch.setattr(kernel, "_SELECTED_AT_ONCE", 16)
    monkeypatch.setattr(kernel, "_NUMBERS", 5 * 2 * 75)
    made = arrays(7, 75, heads=2, size=4, levels=levels, lengths=(75, 23))
    check(bound_of(made, k=5, causal=causal), TILE)


def test_passes_that_would_not_end_are_a_sort(monkeypatch):
    monkeypatch.setattr(kernel, "_SELECTED_AT_ONCE", 16)
    check(bound_of(arrays(5, 40, heads=2, size=4, levels=1, lengths=(40, 7)), k=9), TILE)


@pytest.mark.parametrize("extreme", ["equal", "infinite", "not numbers", "neighbours"])
def test_bisection_at_the_ends_of_the_floats(monkeypatch, extreme):
    """Scores are the weights times one, so that they can be anything."""
    tokens = np.ones((1, 24, 1), np.float32)
    if extreme == "infinite":
        tokens[0, 3::5] = np.inf
    elif extreme == "not numbers":
        tokens[0, ::2] = np.nan
    elif extreme == "neighbours":
        tokens = np.nextafter(tokens, np.float32(2), where=np.arange(24)[None, :, None] % 3 == 0, out=tokens)
    weights = np.asarray([1.0, -1.0, 0.0, np.nan, 3e38, -3e38, 1e-30], np.float32)[None, :, None]

    def made(rng):
        return {"query": np.ones((1, 7, 1, 1), np.float32), "key": tokens, "weights": weights}

    check(bound_of(made, k=6, causal=False), TILE)


def shapes_of(queries, tokens, heads, size, k, *, batch=1, dtype="bfloat16", scaled=False):
    """A call of the shapes of a model; no arrays."""

    def make():
        found.append(OPERATION.canonicalise(
            jnp.zeros((batch, queries, heads, size), dtype), jnp.zeros((batch, tokens, size), dtype),
            jnp.zeros((batch, queries, heads)), None, jnp.zeros((batch, tokens)) if scaled else None, k=k,
        ))  # fmt: skip
        return found[0].inputs

    found = []
    inputs = jax.eval_shape(make)
    return found[0].call, inputs


def compilations(call, inputs, chosen):
    recorder = testing.Recorder()
    with intercept_launches(recorder):
        jax.eval_shape(lambda inputs: kernel.forward(call, inputs, chosen), inputs)
    return {one.identity: one for one in recorder.compilations}.values()


MACHINE = {
    "training": (shapes_of(8192, 8192, 64, 128, 2048), 9),
    "long prefill": (shapes_of(8192, 131072, 64, 128, 2048), 9),
    "decoding": (shapes_of(1, 32768, 64, 128, 2048, batch=64), 6),
    "float8": (shapes_of(4096, 32768, 64, 128, 2048, dtype=FLOAT8, scaled=True), 9),
    "float32": (shapes_of(4096, 8192, 32, 128, 2048, dtype="float32"), 3),
}


@needs_jax_triton
@pytest.mark.parametrize("capability_number", [80, 90])
@pytest.mark.parametrize("name", MACHINE)
def test_every_config_fits(triton_cache, name, capability_number):
    """And products run on tensor cores, without spills."""
    if (name, capability_number) == ("float8", 80):
        pytest.skip("compute capability 8.0 has no float8")
    target = Target("gpu", "", f"{capability_number // 10}.0")
    (call, inputs), least = MACHINE[name]
    space = config.search_space(call, target)
    assert space[0] == config.heuristic(call, target) and least <= len(space) <= 12
    for chosen in space[:1] if name == "long prefill" else space:
        for compilation in compilations(call, inputs, chosen):
            machine = compilation.compile(capability_number)
            assert machine.metadata.shared <= shared_memory_limit(target), chosen
            assert testing.resources(machine).spilling == 0, (compilation.kernel, chosen)
            if compilation.kernel is kernel.index_scores_kernel and name != "float32":
                assert {80: "mma.sync", 90: "wgmma.mma_async"}[capability_number] in machine.asm["ptx"]


@needs_jax_triton
@pytest.mark.parametrize("dtype", ["bfloat16", FLOAT8])
def test_sizes_of_one_compile(triton_cache, dtype):
    """Triton makes constants of integers that are 1, and has no products of fewer than 32 channels of one byte."""
    for compilation in compilations(*shapes_of(1, 2, 1, 1, 1, dtype=dtype), TILE):
        assert compilation.compile(90).asm["cubin"]


def test_two_programs_of_the_heuristic_share_a_multiprocessor():
    chosen = config.heuristic(MACHINE["training"][0][0], H100)
    assert (chosen.block_k, chosen.block_q, chosen.num_stages) == (256, 32, 2)
    assert config.heuristic(MACHINE["decoding"][0][0], H100).block_q == 1


def test_supports_says_what_is_too_large():
    assert capability.supports_forward(shapes_of(2, 64, 16, 8, 8)[0], H100) is None or version_problem()
    assert "257 channels are above 256" in str(capability.supports_forward(shapes_of(2, 64, 2, 257, 8)[0], H100))
    long = shapes_of(1, 2**24 + 1, 1, 16, 8)[0]
    assert "16777217 tokens are above 16777216" in str(capability.supports_forward(long, H100))
    many = shapes_of(2**22 + 1, 16, 1, 16, 8)[0]
    assert "4194305 queries are above 4194304" in str(capability.supports_forward(many, H100))
    old = Target("gpu", "NVIDIA A100-SXM4-80GB", "8.0")
    assert "no float8_e4m3fn below compute capability 8.9" in str(capability.supports_forward(MACHINE["float8"][0][0], old))
