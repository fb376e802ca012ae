"""`block_sparse_attention` in Triton on a machine without a GPU: interpreted, compiled ahead of time, lowered.

The kernels are those of `flash_attention`; here are the lists that they walk.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.operations.block_sparse_attention import reference
from ejkernel.operations.block_sparse_attention.cases import CASES
from ejkernel.operations.block_sparse_attention.interface import (
    OPERATION,
    BlockSparseAttentionInputs,
    BlockSparseAttentionOutputs,
)
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel_triton._versions import version_problem
from ejkernel_triton.block_sparse_attention import capability, config, problem
from ejkernel_triton.flash_attention.config import BackwardConfig, ForwardConfig

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton.block_sparse_attention import kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
SMALL = {case.name: case for case in CASES if not any(tag.startswith("bench") for tag in case.tags)}
FORWARD = ForwardConfig(16, 16, 1, 1)
BACKWARD = BackwardConfig(16, 16, 1, 1, 16, 16, 1, 1)


def bind(arrays, dtype="float32", **options):
    """Call with residuals, inputs and random cotangents."""
    given = {name: jnp.asarray(x, dtype if x.dtype == np.float32 else x.dtype) for name, x in arrays.items()}
    bound = OPERATION.canonicalise(**given, **options)
    out = OPERATION.output_specs(bound.call).out
    d_out = jnp.asarray(np.random.default_rng(1).standard_normal(out.shape), out.dtype)
    return dataclasses.replace(bound.call, save_residuals=True), bound.inputs, BlockSparseAttentionOutputs(d_out)


def check(call, inputs, cotangents, forward=FORWARD, backward=BACKWARD, limit=1e-5):
    """Outputs and gradients against the reference in float64; returns ours."""

    got = kernel.forward(call, inputs, forward)
    gradients = kernel.backward(call, inputs, got, cotangents, backward)
    with np.errstate(all="ignore"):
        exact = reference.forward(call, widened(inputs))
        wanted = reference.backward(call, widened(inputs), exact, widened(cotangents))
    np.testing.assert_allclose(np.asarray(got.out, np.float64), exact.out, atol=limit, rtol=limit)
    for name in OPERATION.differentiable:
        ours, right = getattr(gradients, name), getattr(wanted, name)
        assert (ours is None) == (right is None)
        if ours is not None:
            np.testing.assert_allclose(np.asarray(ours, np.float64), right, atol=limit, rtol=limit, err_msg=name)
    return got, gradients


@pytest.mark.parametrize("name", sorted(SMALL))
def test_numbers_in_the_interpreter(interpreted, name):
    case = SMALL[name]
    check(*bind(case.arrays(np.random.default_rng(0)), **case.options))


LISTS = np.array([[[0, 2, -1], [1, -1, 2], [2, 0, 1]], [[2, -1, -1], [-1, 0, -1], [1, 2, -1]]], np.int32)
FULL = np.array([[[1, 1, 0], [1, 0, 0], [1, 1, 1]], [[1, 0, 0], [0, 0, 0], [0, 1, 0]]], bool)


def listed_arrays(queries=84, keys=75, heads=4, key_heads=2, **more):
    """Blocks of 32 x 32 with tails at both ends."""
    rng = np.random.default_rng(0)
    sizes = {"query": (queries, heads), "key": (keys, key_heads), "value": (keys, key_heads)}
    arrays = {name: rng.standard_normal((2, *size, 8)).astype(np.float32) for name, size in sizes.items()}
    return {**arrays, "key_tiles": LISTS, **more}


BLOCKS = {"q_blocksize": 32, "kv_blocksize": 32}


@pytest.mark.parametrize("full", [None, FULL], ids=["unknown", "full"])
@pytest.mark.parametrize("blocks", [(16, 16), (32, 16), (16, 32), (32, 32)])
def test_lists_are_walked(interpreted, blocks, full):
    arrays = listed_arrays() if full is None else listed_arrays(full_tiles=full)
    call, inputs, cotangents = bind(arrays, **BLOCKS)
    assert problem.walks_lists(call) and problem.dense_call_of(call).mask is None
    check(call, inputs, cotangents, ForwardConfig(*blocks, 1, 1), BackwardConfig(*blocks, 1, 1, *blocks, 1, 1))


@pytest.mark.parametrize("key_tiles", [LISTS, np.stack([LISTS, LISTS[::-1], LISTS, LISTS], 1)], ids=["shared", "by-head"])
def test_lists_are_walked_in_splits(interpreted, key_tiles):
    """Two of the heads, and of a head's list of queries two or more."""
    arrays = listed_arrays(key_tiles=key_tiles)
    backward = BackwardConfig(16, 16, 1, 1, 16, 16, 1, 1, key_splits=8)
    check(*bind(arrays, **BLOCKS), ForwardConfig(16, 16, 1, 1), backward)


@pytest.mark.parametrize("more", [{"causal": True}, {"sliding_window": (40, 3)}, {"logits_soft_cap": 3.0}])
def test_lists_under_masks(interpreted, more):
    check(*bind(listed_arrays(), **BLOCKS, **more))


def test_hidden_tiles_are_not_read(interpreted):
    """No list names the last keys: NaN there must not be seen. Full tiles stand at both ends of the lists."""
    arrays = listed_arrays(96, 96, key_tiles=np.array([[[1, 0], [0, -1], [-1, 1]]], np.int32))
    arrays["full_tiles"] = np.array([[[0, 1], [1, 0], [0, 0]]], bool)
    arrays["key"][:, 64:], arrays["value"][:, 64:], arrays["query"][:, 64:] = np.nan, np.inf, np.nan
    got, gradients = check(*bind(arrays, **BLOCKS))
    assert np.isfinite(np.asarray(got.out)).all() and not np.asarray(got.out)[:, 64:].any()
    assert not np.asarray(gradients.key)[:, 64:].any()


def test_masks_of_one_form_become_lists_of_the_tiles_that_they_leave():
    arrays = listed_arrays(96, 96)
    del arrays["key_tiles"]
    call, inputs, _ = bind(arrays, causal=True, sliding_window=(31, 0))
    _, _, lists = problem.dense_problem(call, inputs)
    table, block = lists(32, 32, False)
    assert block == 32
    np.testing.assert_array_equal(table[0, 0, :, :4], [[0, 0, 0, 32], [0, 0, 0, 64], [0, 0, 0, 64]])
    assert [sorted(row[4 : 4 + row[3] // 32].tolist()) for row in np.asarray(table[0, 0])] == [[0], [0, 1], [1, 2]]
    table, _ = lists(32, 16, True)
    assert table.shape == (1, 1, 6, 4 + 3)
    np.testing.assert_array_equal(table[0, 0, :, 3], [64, 64, 64, 64, 32, 32])


def test_masks_of_heads_become_lists_of_each_head():
    """Head 0 sees its own tile alone, head 1 nothing, the others all: each skips what it does not see."""
    arrays = listed_arrays(96, 96)
    del arrays["key_tiles"]
    tiles = np.stack([np.eye(3, dtype=bool), np.zeros((3, 3), bool), np.ones((3, 3), bool), np.ones((3, 3), bool)])
    mask = np.kron(tiles, np.ones((32, 32), bool))[None]
    call, inputs, _ = bind({**arrays, "mask": mask})
    _, _, lists = problem.dense_problem(call, inputs)
    for by_key in (False, True):
        table, _ = lists(32, 32, by_key)
        np.testing.assert_array_equal(table[0, :, :, 3], np.array([[32], [0], [96], [96]]) * np.ones((1, 3), int))


@pytest.mark.parametrize("full", [False, True], ids=["unknown", "full"])
@pytest.mark.parametrize("blocks", [(16, 16), (32, 16)])
def test_lists_of_heads_are_walked(interpreted, blocks, full):
    """Query heads that share keys have other lists; one sees nothing; members have their own, which `full_tiles` may promise."""
    some = np.random.default_rng(3).random((2, 4, 3, 3)) < 0.5
    some[:, 1], some[0, 2] = False, True
    order = np.argsort(~some, axis=-1, kind="stable")
    tiles = np.where(np.take_along_axis(some, order, -1), order, -1).astype(np.int32)
    arrays = listed_arrays(key_tiles=tiles, **({"full_tiles": tiles >= 0} if full else {}))
    call, inputs, cotangents = bind(arrays, **BLOCKS)
    assert call.per_head_tiles and problem.walks_lists(call) and problem.dense_call_of(call).mask is None
    got, _ = check(call, inputs, cotangents, ForwardConfig(*blocks, 1, 1), BackwardConfig(*blocks, 1, 1, *blocks, 1, 1))
    assert not np.asarray(got.out)[:, :, 1].any()


def test_rules_and_uneven_blocks_become_masks():
    call, _, _ = bind(listed_arrays(21, 19, key_tiles=LISTS[:1]), q_blocksize=7, kv_blocksize=8)
    assert not problem.walks_lists(call) and problem.dense_call_of(call).mask.shape == (1, 1, 21, 19)
    call, _, _ = bind(SMALL["predicate"].arrays(np.random.default_rng(0)), **SMALL["predicate"].options)
    assert problem.dense_call_of(call).mask.shape == (1, 1, 33, 33)


@pytest.mark.parametrize("blocks", [(128, 128), (96, 48), (16, 512)])
def test_tiles_divide_the_listed_blocks(blocks):
    query = jax.ShapeDtypeStruct((1, 4096, 8, 128), "bfloat16")
    lists = jax.ShapeDtypeStruct((1, -(-4096 // blocks[0]), 5), "int32")
    found = {}

    def run(query, lists):
        found["call"] = OPERATION.canonicalise(
            query, query, query, key_tiles=lists, q_blocksize=blocks[0], kv_blocksize=blocks[1]
        ).call

    jax.eval_shape(run, query, lists)
    for space in (config.FORWARD, config.BACKWARD):
        configs = space.search_space(found["call"], H200)
        assert space.heuristic(found["call"], H200) in configs
        for one in configs:
            sizes = dataclasses.asdict(one)
            assert all(
                blocks[0] % size == 0 for name, size in sizes.items() if name in ("block_q", "key_block_q", "query_block_q")
            )
            assert all(
                blocks[1] % size == 0 for name, size in sizes.items() if name in ("block_k", "key_block_k", "query_block_k")
            )


@needs_jax_triton
def test_lowers_for_cuda():
    layout = ejkernel.block_sparse_layout(512, causal=True, sliding_window=(100, 0))

    def loss(query, key, value):
        out = ejkernel.blocksparse_attention(query, key, value, qkv_layouts=layout, platform="triton")
        return out.astype(jnp.float32).sum()

    arrays = [jax.ShapeDtypeStruct((1, heads, 512, 64), "bfloat16") for heads in (4, 2, 2)]
    with ejkernel.use(target=H200):
        text = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert "ejkernel.block_sparse_attention.backward[triton]" in text
    assert text.count("stablehlo.custom_call @triton_kernel_call") == 3


@needs_jax_triton
def test_supports():
    call, _, _ = bind(listed_arrays(), **BLOCKS)
    assert capability.supports_forward(call, H200) is None
    assert capability.supports_backward(call, H200) is None
    assert "the target is cpu" in str(capability.supports_forward(call, Target("cpu")))
    long = {name: dataclasses.replace(getattr(call, name), shape=(2, 2**17, 4, 8)) for name in ("query", "key", "value")}
    uneven = dataclasses.replace(call, **long, q_blocksize=24)
    assert "lists of 24 x 32 blocks would need a mask of 34359738368 bytes" in str(capability.supports_forward(uneven, H200))


def test_an_empty_call(interpreted):
    arrays = {name: np.zeros((2, 0, 2, 8), np.float32) for name in ("query", "key", "value")}
    call, inputs, cotangents = bind({**arrays, "key_tiles": np.zeros((1, 0, 3), np.int32)}, **BLOCKS)
    out = kernel.forward(call, inputs, FORWARD)
    assert out.out.shape == (2, 0, 2, 8)
    assert isinstance(kernel.backward(call, inputs, out, cotangents, BACKWARD), BlockSparseAttentionInputs)
