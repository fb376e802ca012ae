"""Packed-sequence utilities against loops over the sequences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ejkernel import packing, xla_utils

TOTAL, SEQUENCES = 11, 4
ends = st.lists(st.integers(0, TOTAL), min_size=SEQUENCES, max_size=SEQUENCES).map(sorted)
lengths = ends.map(lambda values: np.diff([0, *values]).tolist())


def cumulative(values):
    return np.concatenate([[0], np.cumsum(values)]).astype(np.int32)


def tokens(values):
    """(sequence, position) of every token."""
    return [(n, i) for n, size in enumerate(values) for i in range(size)]


def padded(rows, total):
    return np.array(rows + [(-1, -1)] * (total - len(rows)), np.int32).reshape(total, 2)


traced_tokens = jax.jit(lambda cu: packing.prepare_token_indices(cu, total_length=TOTAL))
traced_chunks = {
    size: jax.jit(lambda cu, size=size: packing.prepare_chunk_indices(cu, size, total_length=TOTAL)) for size in (1, 2, 4)
}


@given(lengths)
@settings(max_examples=40, deadline=None)
def test_indices_of_traced_lengths(values):
    cu = cumulative(values)
    np.testing.assert_array_equal(traced_tokens(cu), padded(tokens(values), TOTAL))
    np.testing.assert_array_equal(packing.prepare_lens(cu), values)
    for size, chunks in traced_chunks.items():
        counts = [-(-n // size) for n in values]
        np.testing.assert_array_equal(packing.prepare_chunk_offsets(cu, size), cumulative(counts))
        rows = chunks(cu)
        assert len(rows) <= (TOTAL + SEQUENCES * (size - 1)) // size
        np.testing.assert_array_equal(rows, padded(tokens(counts), len(rows)))


def test_indices_of_known_lengths():
    cu = [0, 3, 3, 4]
    np.testing.assert_array_equal(packing.prepare_position_ids(cu), [0, 1, 2, 0])
    np.testing.assert_array_equal(packing.prepare_sequence_ids(cu), [0, 0, 0, 2])
    np.testing.assert_array_equal(packing.prepare_token_indices(cu), [[0, 0], [0, 1], [0, 2], [2, 0]])
    np.testing.assert_array_equal(packing.prepare_chunk_indices(cu, 2), [[0, 0], [0, 1], [2, 0]])
    assert packing.prepare_position_ids(cu).dtype == jnp.int32
    assert packing.prepare_sequence_ids([0]).shape == (0,)
    np.testing.assert_array_equal(jax.jit(lambda: packing.prepare_sequence_ids(cu))(), [0, 0, 0, 2])


def test_vmap_over_cumulative_lengths():
    rows = jax.vmap(lambda cu: packing.prepare_sequence_ids(cu, total_length=4))(jnp.array([[0, 1, 3], [0, 4, 4]]))
    np.testing.assert_array_equal(rows, [[0, 1, 1, -1], [0, 0, 0, 0]])


def test_lengths_from_masks():
    mask = np.array([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], bool)
    np.testing.assert_array_equal(packing.prepare_lens_from_mask(mask), [2, 0, 4])
    cu = packing.prepare_cu_seqlens_from_mask(jnp.asarray(mask))
    np.testing.assert_array_equal(cu, [0, 2, 2, 6])
    assert cu.dtype == jnp.int32
    assert packing.prepare_cu_seqlens_from_mask(mask, out_dtype=jnp.uint32).dtype == jnp.uint32
    np.testing.assert_array_equal(jax.vmap(packing.prepare_cu_seqlens_from_mask)(mask[None]), [[0, 2, 2, 6]])


def sums(values, groups, reverse):
    """Cumulative sums within equal groups, token by token; groups -1 give 0. values `[T, C]`, float64."""
    out = np.zeros_like(values)
    for t, group in enumerate(groups):
        if group[0] >= 0:
            same = [u for u, other in enumerate(groups) if other == group and (u >= t if reverse else u <= t)]
            out[t] = values[same].sum(axis=0)
    return out


def groups_of(total, cu, chunk):
    owner = (
        [(0, t) for t in range(total)] if cu is None else [tuple(row) for row in padded(tokens(np.diff(cu).tolist()), total)]
    )
    return [(n, 0 if chunk is None else i // chunk) if n >= 0 else (-1, -1) for n, i in owner]


@pytest.mark.parametrize("chunk", [None, 1, 3, 16])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("cu", [None, (0, 4, 4, 9)])
def test_cumulative_sums_and_their_gradients(chunk, reverse, head_first, cu):
    batch, channels = (2 if cu is None else 1), (3, 2)
    g = np.random.default_rng(0).standard_normal((batch, TOTAL, *channels))

    def run(x):
        x = jnp.moveaxis(x, 1, 2) if head_first else x
        out = (
            packing.chunk_global_cumsum(x, reverse=reverse, cu_seqlens=cu, head_first=head_first, scale=0.5)
            if chunk is None
            else packing.chunk_local_cumsum(x, chunk, reverse=reverse, cu_seqlens=cu, head_first=head_first, scale=0.5)
        )
        return jnp.moveaxis(out, 2, 1) if head_first else out

    groups = groups_of(TOTAL, cu, chunk)
    expected = np.stack([0.5 * sums(row.reshape(TOTAL, -1), groups, reverse).reshape(row.shape) for row in g])
    x = jnp.asarray(g, jnp.float32)
    out, pullback = jax.vjp(jax.jit(run), x)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    weights = np.random.default_rng(1).standard_normal(g.shape)
    transposed = np.stack([0.5 * sums(row.reshape(TOTAL, -1), groups, not reverse).reshape(row.shape) for row in weights])
    np.testing.assert_allclose(pullback(jnp.asarray(weights, jnp.float32))[0], transposed, atol=2e-6)


def test_cumulative_sums_take_traced_lengths_and_hide_what_lies_beyond():
    g = jnp.arange(1.0, 7.0)[None, :, None].at[0, 5].set(jnp.nan)
    f = jax.jit(lambda x, cu: packing.chunk_local_cumsum(x, 2, cu_seqlens=cu))
    np.testing.assert_array_equal(f(g, jnp.array([0, 3, 5]))[0, :, 0], [1, 3, 3, 4, 9, 0])
    np.testing.assert_array_equal(f(g, jnp.array([0, 1, 5]))[0, :, 0], [1, 2, 5, 4, 9, 0])
    grad = jax.grad(lambda x: f(x, jnp.array([0, 3, 5])).sum())(g)
    np.testing.assert_array_equal(grad[0, :, 0], [2, 1, 1, 2, 1, 0])


def test_a_sum_is_not_disturbed_by_earlier_sequences():
    g = jnp.array([1e8, 1.0, 2.0])[None, :, None]
    np.testing.assert_array_equal(packing.chunk_global_cumsum(g, cu_seqlens=[0, 1, 3])[0, :, 0], np.float32([1e8, 1, 3]))


def test_half_precision_is_summed_in_float32():
    g = jnp.full((1, 4096, 1), 1.0, jnp.bfloat16)
    out = packing.chunk_global_cumsum(g)
    assert out.dtype == jnp.bfloat16 and float(out[0, -1, 0]) == 4096.0
    assert packing.chunk_global_cumsum(g, output_dtype=jnp.float32).dtype == jnp.float32
    assert float(packing.chunk_local_cumsum(g, 64, softmax_scale=0.25)[0, 63, 0]) == 16.0
    assert packing.chunk_local_cumsum(jnp.zeros((1, 0, 2)), 4, cu_seqlens=[0]).shape == (1, 0, 2)
    assert packing.chunk_global_cumsum(jnp.zeros((1, 0, 2))).shape == (1, 0, 2)


def test_identity_rounds_only_the_gradient():
    f = packing.identity_dtype_convert(jnp.bfloat16)
    x = jnp.float32(1.0009765625)
    value, grad = jax.jit(jax.value_and_grad(lambda x: f(x) * jnp.float32(1.0009765625)))(x)
    assert float(value) == float(np.float32(1.0009765625) ** 2)
    assert float(grad) == 1.0 and grad.dtype == jnp.float32
    np.testing.assert_array_equal(jax.vmap(jax.grad(lambda x: f(x) * 3))(jnp.ones(2)), [3, 3])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_identity_hands_wider_gradients_on(dtype: str):
    """As mixed-precision training wants it: float32 gradients of half-precision parameters, under every transform."""
    f, x = packing.identity_dtype_convert(jnp.float32), jnp.ones(2, dtype)
    loss = lambda x: (f(x).astype(jnp.float32) * jnp.float32(3)).sum()
    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.checkpoint(loss)), jax.vmap(jax.grad(loss))):
        out = gradient(x)
        assert out.dtype == jnp.float32 and out.tolist() == [3.0, 3.0]
    value, pullback = jax.vjp(f, x)
    assert value.dtype == dtype and pullback(value)[0].dtype == jnp.float32


@pytest.mark.parametrize("strategy", ["zigzag", "striped"])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_reordered_shards_carry_equal_causal_work(strategy, shards):
    length = 12 * shards
    x = jnp.arange(length)[None, :, None] * jnp.ones((1, 1, 2), jnp.int32)
    out = packing.reorder_sequence(x, shards, strategy=strategy)
    np.testing.assert_array_equal(packing.reorder_sequence(out, shards, strategy=strategy, inverse=True), x)
    work = (np.asarray(out[0, :, 0]).reshape(shards, -1) + 1).sum(axis=1)
    assert np.ptp(work) <= (0 if strategy == "zigzag" else length // shards * (shards - 1))
    if strategy == "striped":
        np.testing.assert_array_equal(out[0, :12, 0], np.arange(0, length, shards))
    grad = jax.grad(
        lambda y: (packing.reorder_sequence(y, shards, axis=0, strategy=strategy) * jnp.arange(float(length))).sum()
    )
    order = packing.reorder_sequence(jnp.arange(length), shards, axis=0, strategy=strategy, inverse=True)
    np.testing.assert_array_equal(grad(jnp.zeros(length)), order)


def test_xla_utils_is_the_same_module_under_its_client_name():
    assert xla_utils.__all__ == packing.__all__
    assert all(getattr(xla_utils, name) is getattr(packing, name) for name in packing.__all__)
    assert packing.cdiv(0, 3) == 0 and packing.cdiv(9, 3) == 3
    np.testing.assert_array_equal(packing.cdiv(jnp.array([0, 1, 8, 9]), 4), [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: packing.prepare_lens([3, 4]), ValueError, "cu_seqlens: got first value 3, expected 0"),
        (lambda: packing.prepare_lens([0, 4, 2]), ValueError, "values that never fall"),
        (lambda: packing.prepare_lens([0.0, 4.0]), TypeError, "cu_seqlens: got dtype float64"),
        (lambda: packing.prepare_position_ids([0, 4], total_length=3), ValueError, "total_length: got 3, expected at least"),
        (lambda: jax.jit(packing.prepare_position_ids)(jnp.array([0, 4])), ValueError, "total_length for a traced cu_seqlens"),
        (lambda: packing.prepare_chunk_indices([0, 4], 0), ValueError, "chunk_size: got 0"),
        (lambda: packing.prepare_lens_from_mask(np.ones((1, 2))), TypeError, "mask: got dtype float64"),
        (lambda: packing.prepare_cu_seqlens_from_mask([True]), ValueError, "mask: got 1 axes"),
        (
            lambda: packing.chunk_local_cumsum(jnp.ones((2, 3, 1)), 2, cu_seqlens=[0, 3]),
            ValueError,
            "g: got batch 2, expected batch 1",
        ),
        (lambda: packing.chunk_local_cumsum(jnp.ones((2, 3)), 2), ValueError, r"g: got shape \(2, 3\)"),
        (lambda: packing.chunk_global_cumsum(jnp.ones((1, 3, 1), jnp.int32)), TypeError, "g: got dtype int32"),
        (lambda: packing.chunk_global_cumsum(jnp.ones((1, 3, 1)), cu_seqlens=[0, 4]), ValueError, "total_length: got 3"),
        (
            lambda: packing.chunk_global_cumsum(jnp.ones((1, 3, 1)), scale=1.0, softmax_scale=1.0),
            ValueError,
            "scale and softmax_scale",
        ),
        (lambda: packing.reorder_sequence(jnp.ones((1, 6)), 2), ValueError, "length 6 along axis 1, expected a multiple of 4"),
        (lambda: packing.reorder_sequence(jnp.ones((1, 6)), 2, axis=2), ValueError, "axis: got 2"),
        (lambda: packing.reorder_sequence(jnp.ones((1, 6)), 2, strategy="zig"), ValueError, "strategy: got 'zig'"),
    ],
)
def test_refusals(make, error, message):
    with pytest.raises(error, match=message):
        make()
