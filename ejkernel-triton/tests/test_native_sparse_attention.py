"""`native_sparse_attention` in Triton on a machine without a GPU: interpreted, compiled ahead of time, lowered."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from both_phases import cotangents_of

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.native_sparse_attention import reference
from ejkernel.operations.native_sparse_attention.cases import CASES
from ejkernel.operations.native_sparse_attention.interface import (
    OPERATION,
    NativeSparseAttentionCall,
    NativeSparseAttentionInputs,
)
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel_triton._versions import version_problem
from ejkernel_triton.native_sparse_attention import capability, config
from ejkernel_triton.native_sparse_attention.config import BackwardConfig, ForwardConfig

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton.native_sparse_attention import kernel, visits

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
SMALL = {case.name: case for case in CASES if not any(tag.startswith("bench") for tag in case.tags)}
FORWARD = ForwardConfig(16, 1, 1)
BACKWARD = BackwardConfig(16, 1, 1, 16, 16, 32, 1, 1)
"""Chunks of two steps, so that nearly every tile of keys has several."""


def problem(arrays, dtype="float32", **options):
    """Call, inputs and random cotangents."""
    floats = {name: jnp.asarray(x, dtype if x.dtype == np.float32 else x.dtype) for name, x in arrays.items()}
    bound = OPERATION.canonicalise(**floats, **options)
    return bound.call, bound.inputs, cotangents_of(OPERATION, bound.call)


def both(call, inputs, cotangents, forward=FORWARD, backward=BACKWARD):
    """Ours: outputs and gradients."""
    call = dataclasses.replace(call, save_residuals=True)
    got = kernel.forward(call, inputs, forward)
    return got, kernel.backward(call, inputs, got, cotangents, backward)


def check(call, inputs, cotangents, forward=FORWARD, backward=BACKWARD, limit=2e-6):
    """Outputs and gradients against the reference in float64."""
    got, gradients = both(call, inputs, cotangents, forward, backward)

    exact = reference.forward(call, widened(inputs))
    wanted = reference.backward(call, widened(inputs), exact, widened(cotangents))
    pairs = [(got.out, exact.out, inputs.query), (got.lse, exact.lse, None)]
    pairs += [(getattr(gradients, name), getattr(wanted, name), getattr(inputs, name)) for name in ("query", "key", "value")]
    for ours, right, like in pairs:
        assert like is None or ours.dtype == like.dtype
        scale = max(float(np.max(np.abs(right), initial=0, where=np.isfinite(right))), 1)
        np.testing.assert_allclose(np.asarray(ours, np.float64), right, atol=limit * scale, rtol=limit)


@pytest.mark.parametrize("name", sorted(set(SMALL) - {"large-logits"}))
def test_numbers_in_the_interpreter(interpreted, name):
    case = SMALL[name]
    with np.errstate(invalid="ignore"):
        check(*problem(case.arrays(np.random.default_rng(0)), **case.options))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(interpreted, dtype):
    case = SMALL["value-size"]
    check(*problem(case.arrays(np.random.default_rng(0)), dtype, **case.options), limit=2e-2)


@pytest.mark.parametrize(("name", "block_size"), [("gqa", 3), ("gqa", 16), ("gqa", 20), ("packed", 16), ("packed", 32)])
def test_blocks_that_are_longer_than_a_tile_of_keys_or_no_divisor_of_it(interpreted, name, block_size):
    arrays = SMALL[name].arrays(np.random.default_rng(0))
    arrays = {x: np.minimum(y, y // 4) if x == "block_indices" else y for x, y in arrays.items()}
    for keys in (16, 32):
        check(*problem(arrays, block_size=block_size), ForwardConfig(keys, 1, 1), BackwardConfig(16, 1, 1, keys, 16, 64, 1, 1))


@pytest.mark.parametrize("chunk", [1, 16, 48, 4096])
def test_chunks_of_any_length(interpreted, chunk):
    case = SMALL["mqa"]
    choice = dataclasses.replace(BACKWARD, key_chunk=chunk)
    check(*problem(case.arrays(np.random.default_rng(0)), **case.options), backward=choice)


def test_groups_of_more_heads_than_one_tile_has(interpreted):
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal((1, 5, heads, 4), np.float32) for name, heads in (("query", 70), ("key", 1), ("value", 1))
    }
    check(*problem({**arrays, "block_indices": np.zeros((1, 5, 1, 1), np.int32)}, block_size=4))


def test_each_member_of_the_batch_may_have_its_own_sequences(interpreted):
    """What vmap over `cu_seqlens` folds to."""
    case = SMALL["gqa"]
    call, inputs, cotangents = problem(case.arrays(np.random.default_rng(0)), **case.options)
    token = np.arange(22)
    starts = np.stack([np.where(token < 7, 0, 7), np.where(token < 13, 0, 13)]).astype(np.int32)
    last = (token[None] - starts)[:, :, None, None] // 4
    blocks = np.where(inputs.block_indices <= last, inputs.block_indices, -1)
    call = dataclasses.replace(call, sequence_starts=ArraySpec.of(starts))
    check(call, inputs._replace(block_indices=jnp.asarray(blocks), sequence_starts=jnp.asarray(starts)), cotangents)


def test_a_query_that_is_not_finite_reaches_only_the_keys_that_it_sees(interpreted):
    """In the dK/dV kernel it shares a tile with queries of other blocks, and of its own with earlier keys."""
    case = SMALL["gqa"]
    arrays = case.arrays(np.random.default_rng(0))
    arrays["block_indices"] = np.where(arrays["block_indices"] > 1, -1, arrays["block_indices"])
    call, inputs, cotangents = problem(arrays, **case.options)
    clean = both(call, inputs, cotangents)
    for field in ("query", "d_out"):
        query, d_out = inputs.query, cotangents.out
        if field == "query":
            query = query.at[0, 6, 1].set(jnp.inf)
        else:
            d_out = d_out.at[0, 6, 1, 2].set(jnp.nan)
        _, found = both(call, inputs._replace(query=query), cotangents._replace(out=d_out))
        seen = np.zeros((2, 22, 2), bool)
        for block in np.asarray(inputs.block_indices)[0, 6, 0]:
            seen[0, max(block, 0) * 4 : min(block * 4 + 4, 7), 0] = block >= 0
        assert seen.any()
        for name in ("key", "value"):
            ours, before = np.asarray(getattr(found, name)), np.asarray(getattr(clean[1], name))
            assert np.isnan(ours[seen]).all()
            np.testing.assert_array_equal(ours[~seen], before[~seen])


def test_visits_of_tiles(interpreted):
    """Two key heads of three tokens with blocks of two; entries that name nothing are in no tile."""
    blocks = np.array([[[[0, -1], [-1, -1]], [[0, -1], [0, -1]], [[1, 0], [-1, 1]]]], np.int32)
    spec = ArraySpec((1, 3, 2, 4), "float32")
    call = NativeSparseAttentionCall(
        query=spec, key=spec, value=spec, block_indices=ArraySpec.of(blocks), block_size=2, softmax_scale=1.0
    )
    found = visits.visits_of(call, NativeSparseAttentionInputs(None, None, None, jnp.asarray(blocks), None), 2, 2)
    assert visits.max_chunks(call, 2, 2) == found.tiles.shape[1] == 5
    np.testing.assert_array_equal(found.chunks_up_to, [[2, 3], [1, 2]])
    np.testing.assert_array_equal(found.tiles, [[0, 0, 1, 2, 2], [0, 1, 2, 2, 2]])
    listed = [
        [np.asarray(found.tokens)[found.begin[row, i] : found.end[row, i]].tolist() for i in range(found.chunks_up_to[row, -1])]
        for row in range(2)
    ]
    assert listed == [[[0, 1], [2], [2]], [[1], [2]]]


def call_of(length=32768, heads=64, key_heads=4, size=128, slots=16, block_size=64, dtype="bfloat16", batch=1):
    query, key = ArraySpec((batch, length, heads, size), dtype), ArraySpec((batch, length, key_heads, size), dtype)
    lists = ArraySpec((batch, length, key_heads, slots), "int32")
    return NativeSparseAttentionCall(
        query=query, key=key, value=key, block_indices=lists, block_size=block_size, softmax_scale=0.1, save_residuals=True
    )


SHAPES = [{}, {"size": 256}, {"dtype": "float32"}, {"heads": 4, "block_size": 16, "length": 100, "slots": 3, "size": 17}]


@pytest.mark.parametrize("shape", SHAPES)
def test_search_spaces_are_small_and_hold_the_heuristic(shape):
    call = call_of(**shape)
    for space in (config.FORWARD, config.BACKWARD):
        found = space.search_space(call, H200)
        assert space.heuristic(call, H200) in found
        assert len(found) == len(set(found)) <= 12


@pytest.mark.parametrize(
    ("shape", "number"),
    [pytest.param(shape, number, marks=pytest.mark.slow if number != 90 else ()) for shape in SHAPES for number in (80, 90)],
)
def test_compiles(recorder, shape, number):
    call, target = call_of(**shape), Target("gpu", "", f"{number // 10}.0")
    specs = call.query, call.key, call.value, call.block_indices
    inputs = NativeSparseAttentionInputs(*(jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in specs), None)

    def run(inputs):
        outputs = kernel.forward(call, inputs, config.forward_heuristic(call, target))
        return kernel.backward(call, inputs, outputs, outputs._replace(lse=None), config.backward_heuristic(call, target))

    jax.eval_shape(run, inputs)
    names = [compilation.kernel.fn.__name__.removeprefix("native_sparse_attention_") for compilation in recorder.compilations]
    kinds = ["forward", "query_gradient", "visits", "key_gradient", "combine", "combine"]
    assert names == [f"{kind}_kernel" for kind in kinds]
    compiled = {name: compilation.compile(number) for name, compilation in zip(names, recorder.compilations, strict=True)}
    assert all(testing.resources(program).spilling < 0.1 for program in compiled.values())
    if not shape:
        for name in ("forward", "query_gradient", "key_gradient"):
            assert "cp.async.cg" in compiled[f"{name}_kernel"].asm["ptx"], "selected blocks are not prefetched"
        assert ("wgmma" in compiled["key_gradient_kernel"].asm["ptx"]) == (number == 90)


@needs_jax_triton
@pytest.mark.parametrize("packed", [False, True])
def test_lowers_for_cuda(packed):
    def loss(query, key, value, blocks, *cu_seqlens):
        out = ejkernel.apply_native_sparse_attention(
            query, key, value, blocks, cu_seqlens=cu_seqlens[0] if packed else None, platform="triton"
        )
        return out.astype(jnp.float32).sum()

    query, key = (jax.ShapeDtypeStruct((1, 256, heads, 32), "bfloat16") for heads in (8, 2))
    arrays = [query, key, key, jax.ShapeDtypeStruct((1, 256, 2, 3), "int32")]
    arrays += [jax.ShapeDtypeStruct((5,), "int32")] if packed else []
    with ejkernel.use(target=H200):
        lowered = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arrays).lower(lowering_platforms=("cuda",))
    text = lowered.as_text(debug_info=True)
    assert "ejkernel.native_sparse_attention.backward[triton]" in text
    assert text.count("stablehlo.custom_call @triton_kernel_call") == 6


@needs_jax_triton
def test_supports():
    def ask(target=H200, phase="forward", **shape):
        return getattr(capability, f"supports_{phase}")(call_of(**shape), target)

    assert ask() is None and ask(phase="backward") is None
    assert "the target is cpu" in str(ask(Target("cpu")))
    assert "float64" in str(ask(dtype="float64"))
    assert "head size 512 is above 256" in str(ask(size=512))
    assert "rows of queries" in str(ask(length=2**26))
    assert "keys of one query" in str(ask(length=2**20, slots=2**12, block_size=2**20, heads=4))
    assert ask(length=2**22, heads=4, slots=64) is None
    assert "named blocks" in str(ask(length=2**22, heads=4, slots=64, phase="backward"))
