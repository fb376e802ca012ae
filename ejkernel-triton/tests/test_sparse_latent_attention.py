"""`sparse_latent_attention` in Triton on a machine without a GPU: numbers of every kind of config, machine code, refusals."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.call import ArraySpec
from ejkernel.operations.sparse_latent_attention import reference
from ejkernel.operations.sparse_latent_attention.interface import OPERATION
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel_triton._capability import shared_memory_limit
from ejkernel_triton._latents.config import LatentAttentionConfig
from ejkernel_triton._versions import version_problem
from ejkernel_triton.sparse_latent_attention import capability, config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import _interpreter, testing
from ejkernel_triton._jax_triton import intercept_launches
from ejkernel_triton.sparse_latent_attention import kernel

H100 = Target("gpu", "NVIDIA H100 80GB HBM3", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"compilation: {version_problem()}")
TILE = LatentAttentionConfig(block_q=1, block_h=2, block_k=16, splits=1, num_warps=4, num_stages=2, keys_first=False)
CONFIGS = {
    "rows first": TILE,
    "all heads, keys first": dataclasses.replace(TILE, block_h=3, block_k=32, keys_first=True),
    "split": dataclasses.replace(TILE, splits=3),
    "split, keys first": dataclasses.replace(TILE, block_h=1, splits=5, keys_first=True),
}


def problem(indices=None, *, queries=5, tokens=90, heads=3, size=12, slots=70, dtype="float32", **options):
    """A canonical call and its arrays; tokens that nobody names are NaN."""
    rng = np.random.default_rng(0)
    if indices is None:
        indices = np.stack([rng.permutation(tokens)[:slots] for _ in range(2 * queries)]).reshape(2, queries, slots)
        indices = np.where(rng.random(indices.shape) < 0.3, -1, indices)
    named = np.zeros((2, tokens), bool)
    for row, query in np.ndindex(2, queries):
        chosen = indices[row, query]
        named[row, chosen[(chosen >= 0) & (chosen < tokens)]] = True
    latents = np.where(named[..., None], rng.standard_normal((2, tokens, size)), np.nan)
    query = jnp.asarray(rng.standard_normal((2, queries, heads, size)), dtype)
    given = {"value_size": 8, **options}
    bound = OPERATION.canonicalise(
        query, jnp.asarray(latents, dtype), jnp.asarray(indices, jnp.int32), return_lse=True, **given
    )
    return bound.call, bound.inputs


def check(call, inputs, chosen, tolerance=1e-6):
    with intercept_launches(_interpreter.interpreted_call):
        got = kernel.forward(call, inputs, chosen)
    exact = reference.forward(call, widened(inputs))
    assert (got.out.dtype, got.lse.dtype) == (inputs.query.dtype, jnp.float32)
    np.testing.assert_allclose(np.asarray(got.out, np.float64), exact.out, rtol=0, atol=tolerance * 4)
    np.testing.assert_allclose(np.asarray(got.lse, np.float64), exact.lse, rtol=tolerance, atol=tolerance * 4)


def placed(first, last, *, slots=70):
    """One query names the tokens of slots `first` to `last`, the others none."""
    indices = np.full((2, 5, slots), -1)
    indices[:, 2, first:last] = np.arange(first, last)
    return indices


PROBLEMS = {
    "some slots name nothing": {},
    "distinct": {"is_distinct": True},
    "all channels are values": {"value_size": 12},
    "negative scale": {"softmax_scale": -0.7},
    "the first slots": {"indices": placed(0, 3), "is_distinct": True},
    "the last slots": {"indices": placed(66, 70), "is_distinct": True},
    "a slot in the middle": {"indices": placed(40, 41), "is_distinct": True},
    "nothing at all": {"indices": placed(0, 0)},
    "repeated": {"indices": np.arange(700).reshape(2, 5, 70) // 9 % 90},
}


@pytest.mark.parametrize("chosen", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_numbers_in_the_interpreter(name, chosen):
    check(*problem(**PROBLEMS[name]), chosen)


@pytest.mark.parametrize("chosen", CONFIGS.values(), ids=CONFIGS)
def test_numbers_of_narrow_types(chosen):
    check(*problem(dtype="bfloat16"), chosen, 1e-2)


@pytest.mark.parametrize("empty", ["query", "key_value", "token_indices"])
def test_nothing_to_attend_to(empty):
    call, inputs = problem()
    fewer = {name: inputs._asdict()[name][:, :0] for name in ((empty, "token_indices") if empty == "query" else (empty,))}
    if empty == "token_indices":
        fewer = {empty: inputs.token_indices[..., :0]}
    call = dataclasses.replace(call, **{name: ArraySpec.of(array) for name, array in fewer.items()})
    got = kernel.forward(call, inputs._replace(**fewer), TILE)
    assert got.out.shape == (*call.query.shape[:3], 8) and (got.out == 0).all() and np.isneginf(got.lse).all()


def shapes_of(queries, tokens, heads, slots, *, batch=1, dtype="bfloat16", size=576, value_size=512):
    """A call of the shapes of a model; no arrays."""

    def make():
        bound = OPERATION.canonicalise(
            jnp.zeros((batch, queries, heads, size), dtype), jnp.zeros((batch, tokens, size), dtype),
            jnp.zeros((batch, queries, slots), jnp.int32), value_size=value_size, is_distinct=True,
        )  # fmt: skip
        found.append(bound)
        return bound.inputs

    found = []
    arrays = jax.eval_shape(make)
    return found[0].call, arrays


def compilations(call, arrays, chosen):
    recorder = testing.Recorder()
    with intercept_launches(recorder):
        jax.eval_shape(lambda arrays: kernel.forward(call, arrays, chosen), arrays)
    return recorder.compilations


@needs_jax_triton
def test_sizes_of_one_compile(triton_cache):
    """Triton makes constants of integers that are 1."""
    for chosen in (TILE, dataclasses.replace(TILE, splits=2, keys_first=True)):
        found = compilations(*shapes_of(1, 1, 1, 1, size=16, value_size=16), chosen)
        assert len(found) == chosen.splits and all(one.compile(90).asm["cubin"] for one in found)


MACHINE = {
    "training": (8192, 8192, 128, 2048),
    "decoding": (1, 32768, 128, 2048),
    "few heads": (4096, 4096, 16, 512),
}


@needs_jax_triton
@pytest.mark.parametrize("capability_number", [80, 90])
@pytest.mark.parametrize("name", MACHINE)
def test_every_config_fits(triton_cache, name, capability_number):
    """And the heuristic's hardly spills in its loop, and copies asynchronously."""
    target = Target("gpu", "", f"{capability_number // 10}.0")
    call, arrays = shapes_of(*MACHINE[name])
    space = config.search_space(call, target)
    assert space[0] == config.heuristic(call, target) and 4 <= len(space) <= 12
    assert all(chosen.block_q == 1 for chosen in space)
    for chosen in dict.fromkeys(dataclasses.replace(one, splits=1) for one in space):
        (compilation,) = compilations(call, arrays, chosen)
        machine = compilation.compile(capability_number)
        assert machine.metadata.shared <= shared_memory_limit(target), chosen
        if chosen == dataclasses.replace(space[0], splits=1):
            assert testing.resources(machine).spilling < 0.06
            assert "cp.async.cg.shared.global" in machine.asm["ptx"]


def test_supports_says_what_is_too_large():
    assert capability.supports_forward(shapes_of(2, 64, 16, 8)[0], H100) is None or version_problem()
    wide = shapes_of(2, 64, 16, 8, value_size=513)[0]
    assert "values of 513 channels are above 512" in str(capability.supports_forward(wide, H100))
    rest = shapes_of(2, 64, 16, 8, value_size=447)[0]
    assert "129 channels beside the values are above 128" in str(capability.supports_forward(rest, H100))


def test_queries_are_not_tiled():
    call, inputs = problem()
    with pytest.raises(ValueError, match="block_q: got 2, expected 1"):
        kernel.forward(call, inputs, dataclasses.replace(TILE, block_q=2))
