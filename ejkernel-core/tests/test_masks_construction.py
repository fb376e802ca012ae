"""Constructors from lengths, transforms, and what is refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ejkernel import MaskInfo, packing

lengths = st.lists(st.integers(0, 4), min_size=3, max_size=3)


def cumulative(values):
    return np.concatenate([[0], np.cumsum(values)])


def blocks(query_lengths, key_lengths, total_q, total_k, *, shift=False, causal=True):
    """Block-diagonal visibility, each block causal."""
    out = np.zeros((total_q, total_k), bool)
    row = column = 0
    for rows, columns in zip(query_lengths, key_lengths, strict=True):
        for i in range(rows):
            for j in range(columns):
                out[row + i, column + j] = not causal or j <= i + (columns - rows if shift else 0)
        row, column = row + rows, column + columns
    return out


@functools.partial(jax.jit, static_argnames=("causal", "causal_alignment"))
def packed_mask(q, k, **static):
    return MaskInfo.from_cu_seqlens(q, k, total_length=12, total_key_length=13, **static).attention_mask


@given(lengths, lengths, st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_standard_cumulative_lengths(query_lengths, key_lengths, shift, causal):
    alignment = "bottom_right" if shift else "top_left"
    mask = packed_mask(cumulative(query_lengths), cumulative(key_lengths), causal=causal, causal_alignment=alignment)
    np.testing.assert_array_equal(mask[0, 0], blocks(query_lengths, key_lengths, 12, 13, shift=shift, causal=causal))


@given(lengths.filter(any))
@settings(max_examples=25, deadline=None)
def test_cumulative_lengths_round_trip_through_segments(values):
    info = MaskInfo.from_cu_seqlens(cumulative(values), total_length=12)
    ids = np.asarray(info.q_segment_ids[0])
    assert [int((ids == n).sum()) for n in range(3)] == values and int((ids == -1).sum()) == 12 - sum(values)
    again = MaskInfo.from_segments(info.q_segment_ids)
    np.testing.assert_array_equal(again.q_position_ids, info.q_position_ids)
    np.testing.assert_array_equal(packing.prepare_cu_seqlens_from_mask(ids == np.arange(3)[:, None]), cumulative(values))


def test_total_length_is_read_only_where_it_can_be():
    assert MaskInfo.from_cu_seqlens([0, 2, 5]).shape == (1, 5, 5)
    assert jax.jit(lambda x: x + MaskInfo.from_cu_seqlens([0, 2, 5]).q_len)(0) == 5
    with pytest.raises(ValueError, match=r"total_length for a traced cu_seqlens_q: .*pass total_length=x.shape\[axis\]"):
        jax.jit(lambda cu: MaskInfo.from_cu_seqlens(cu).attention_mask)(jnp.array([0, 2, 5]))


def prefix_lm(prefixes, queries, keys, offset=0):
    index, query = np.arange(keys)[None, None], np.arange(queries)[None, :, None] + offset
    return (index <= query) | (index < np.array(prefixes)[:, None, None])


@pytest.mark.parametrize(("queries", "keys", "offset"), [(4, 4, 0), (2, 5, 3), (5, 2, 0), (0, 3, 0)])
def test_from_prefix_lengths(queries, keys, offset):
    """Each row has a prefix of its own; the same in numbers that are traced; with lengths as another part."""
    prefixes = [0, 1, min(2, keys), keys]
    wanted = prefix_lm(prefixes, queries, keys, offset)
    info = MaskInfo.from_prefix_lengths(prefixes, queries, keys, causal_offset=offset)
    np.testing.assert_array_equal(info.attention_mask[:, 0], wanted)
    traced = jax.jit(lambda n: MaskInfo.from_prefix_lengths(n, queries, keys, causal_offset=offset).attention_mask)
    np.testing.assert_array_equal(traced(jnp.array(prefixes))[:, 0], wanted)
    padded = MaskInfo.from_prefix_lengths(prefixes, queries, keys, causal_offset=offset, key_lengths=[1] * 4)
    np.testing.assert_array_equal(padded.attention_mask[:, 0], wanted & (np.arange(keys) < 1))
    for row, prefix in enumerate(prefixes):
        one = MaskInfo(causal=True, prefix=prefix, causal_offset=offset, sizes=(1, queries, keys)).attention_mask
        np.testing.assert_array_equal(one[0, 0], wanted[row])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefix_lengths": [5]}, r"prefix_lengths: got \[5\], expected values in \[0, 4\]"),
        ({"window": 2}, "window: got 2, expected None; a prefix of each row is said with positions"),
        ({"chunk_size": 2}, "chunk_size: got 2, expected None"),
        ({"prefix": 2}, "prefix: got 2, expected None"),
        ({"causal": False}, "causal: got False, expected None"),
        ({"causal_offset": -1}, "causal_offset: got -1, expected a value >= 0"),
    ],
)
def test_prefix_lengths_that_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        MaskInfo.from_prefix_lengths(**{"prefix_lengths": [1], "q_len": 4, **fields})


def test_from_lengths():
    info = MaskInfo.from_lengths([2, 0], 3, key_lengths=[1, 2], key_max_length=2)
    np.testing.assert_array_equal(info.attention_mask[:, 0], [[[1, 0], [1, 0], [0, 0]], np.zeros((3, 2))])
    np.testing.assert_array_equal(info.q_segment_ids, [[0, 0, -1], [-1, -1, -1]])
    np.testing.assert_array_equal(info.kv_segment_ids, [[0, -1], [0, 0]])
    np.testing.assert_array_equal(info.q_position_ids, [[0, 1, -1], [-1, -1, -1]])
    np.testing.assert_array_equal(
        jax.jit(lambda n: MaskInfo.from_lengths(n, 3, causal=True).attention_mask)(jnp.array([2]))[0, 0],
        [[1, 0, 0], [1, 1, 0], [0, 0, 0]],
    )
    with pytest.raises(ValueError, match=r"lengths: got \[4\], expected values in \[0, 3\]"):
        MaskInfo.from_lengths([4], 3)


def test_vmap_over_segments_and_nested():
    ids = jnp.array([[[0, 0, 1]], [[0, 1, 1]]])

    def f(rows):
        return MaskInfo.from_segments(rows).apply_causal().attention_mask

    expected = np.stack([np.asarray(f(rows)) for rows in ids])
    np.testing.assert_array_equal(jax.vmap(f)(ids), expected)
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.vmap(f)))(ids[None])[0], expected)
    stacked = jax.vmap(lambda rows: MaskInfo.from_segments(rows).apply_causal())(ids)
    assert stacked.query_segments.shape == (2, 1, 3) and stacked.causal
    np.testing.assert_array_equal(jax.vmap(lambda info: info.attention_mask)(stacked), expected)


def test_scan_cond_and_checkpoint_carry_it():
    info = MaskInfo.from_lengths([1], 4).apply_causal()

    def step(carry, _):
        longer = carry.replace(key_lengths=carry.key_lengths + 1)
        return longer, longer.attention_mask.sum()

    last, totals = jax.lax.scan(step, info, length=3)
    np.testing.assert_array_equal(totals, [1, 1, 1])
    np.testing.assert_array_equal(last.key_lengths, [4])
    picked = jax.lax.cond(True, lambda i: i, lambda i: i.replace(key_lengths=i.key_lengths * 0), info)
    np.testing.assert_array_equal(picked.attention_mask, info.attention_mask)

    @jax.checkpoint
    def f(x, info):
        return (x * info.create_bias(jnp.float32).clip(-1)).sum()

    assert float(jax.grad(f)(jnp.float32(2.0), info)) == -15.0  # one of sixteen pairs is visible


def test_methods_work_on_the_local_part_of_a_sharded_mask():
    info = MaskInfo.dynamic_init(input_ids=jnp.zeros((2, 3), jnp.int32)).apply_kv_lengths(jnp.array([1, 2]), q_len=2)
    local = jax.tree.map(lambda leaf: leaf[:1], info).apply_causal()
    assert info.sizes == (None, None, None) and local.shape == (1, 2, 3)
    np.testing.assert_array_equal(local.attention_mask[0, 0], [[1, 0, 0], [1, 0, 0]])
    specs = jax.tree.map(lambda leaf: jax.sharding.PartitionSpec("x"), info)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    run = jax.shard_map(
        lambda i: i.apply_causal().materialize(), mesh=mesh, in_specs=(specs,), out_specs=jax.sharding.PartitionSpec("x")
    )
    np.testing.assert_array_equal(jax.jit(run)(info), info.apply_causal().attention_mask)


def test_nothing_leaks_from_a_trace():
    info = MaskInfo.from_attention_mask(np.tri(3, dtype=bool)[None])
    with jax.checking_leaks():
        jax.jit(lambda i: (i.q_segment_ids, i.attention_mask, i.q_position_ids))(info)
        jax.jit(lambda: (info.q_segment_ids, info.attention_mask, info.create_bias()))()
    assert not any(isinstance(value, jax.core.Tracer) for value in vars(info).values())
    np.testing.assert_array_equal(info.attention_mask[0, 0], np.tri(3))


def test_segments_read_from_a_dense_mask_only_mark_padding():
    dense = np.tri(4, dtype=bool)[None, None].copy()
    dense[..., 3, :] = False
    info = MaskInfo(dense)
    np.testing.assert_array_equal(info.q_segment_ids, [[0, 0, 0, -1]])
    np.testing.assert_array_equal(info.kv_segment_ids, [[0, 0, 0, -1]])
    np.testing.assert_array_equal(info.materialize_segment_ids().attention_mask, dense)


def test_unknown_sizes():
    assert MaskInfo().attention_mask is None and MaskInfo().q_segment_ids is None
    with pytest.raises(ValueError, match="use materialize"):
        _ = MaskInfo.causal().attention_mask
    np.testing.assert_array_equal(MaskInfo.causal().materialize(2, 2)[0, 0], np.tri(2))
    lone = MaskInfo(key_segments=[[3, -1]])
    np.testing.assert_array_equal(lone.materialize(query_length=2)[0, 0], [[1, 0], [1, 0]])
    assert MaskInfo.causal(0).attention_mask.shape == (1, 1, 0, 0)


def test_works_on_abstract_values():
    info = jax.eval_shape(lambda: MaskInfo.from_segments(jnp.zeros((2, 3), jnp.int32)))
    assert info.shape == (2, 3, 3) and repr(info) == "MaskInfo(query_segments=int32[2,3], key_segments=int32[2,3])"
    assert MaskInfo(key_segments=jax.ShapeDtypeStruct((2, 3), jnp.int32)).kv_len == 3


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: MaskInfo.from_attention_mask(np.ones((1, 2))),
            TypeError,
            "attention_mask: got dtype float64.*additive values",
        ),
        (lambda: MaskInfo.from_attention_mask([[1, 2, 2]]), ValueError, "attention_mask: got integers in .1, 2.*from_segments"),
        (lambda: MaskInfo.from_attention_mask(np.ones(3, bool)), ValueError, r"attention_mask: got shape \(3,\)"),
        (lambda: MaskInfo(np.ones((2, 2), bool)), ValueError, r"dense: got shape \(2, 2\).*from_attention_mask"),
        (lambda: MaskInfo.from_segments([0, 1]), ValueError, r"query_segments: got shape \(2,\), expected \[batch, query\]"),
        (lambda: MaskInfo.from_segments([[0.5]]), TypeError, "query_segments: got dtype float64"),
        (lambda: MaskInfo.from_segments(None), ValueError, "query_segments: got None"),
        (lambda: MaskInfo.from_segments([[2**40]]), ValueError, "values that int32 can hold"),
        (lambda: MaskInfo(query_segments="no"), TypeError, "query_segments: got str, expected an array"),
        (lambda: MaskInfo(np.ones((1, 1, 2, 3), bool), [[0, 0, 0]]), ValueError, "query_segments, dense: got 3 and 2"),
        (lambda: MaskInfo(key_segments=[[0, 0]], key_positions=[[0]]), ValueError, "one number of keys"),
        (lambda: MaskInfo(query_lengths=[1, 2], key_lengths=[1, 2, 3]), ValueError, "got 2 and 3, expected one batch size"),
        (lambda: MaskInfo(window=-1), ValueError, "window: got -1, expected at least 0"),
        (lambda: MaskInfo(window=(1, 2, 3)), ValueError, "an int or .left, right."),
        (lambda: MaskInfo(window=True), TypeError, "window: got True, expected an int"),
        (lambda: MaskInfo(chunk_size=0), ValueError, "chunk_size: got 0, expected at least 1"),
        (lambda: MaskInfo(prefix=-1), ValueError, "prefix: got -1"),
        (lambda: MaskInfo(causal_offset=1.5), TypeError, "causal_offset: got 1.5, expected an int"),
        (
            lambda: MaskInfo.from_cu_seqlens([0, 3, 2]),
            ValueError,
            "cu_seqlens_q: got .0, 3, 2., expected values that never fall",
        ),
        (lambda: MaskInfo.from_cu_seqlens([2, 3]), ValueError, "cu_seqlens_q: got first value 2, expected 0.*not lengths"),
        (lambda: MaskInfo.from_cu_seqlens([0, 5], total_length=4), ValueError, "total_length: got 4, expected at least .* 5"),
        (lambda: MaskInfo.from_cu_seqlens([0, 5], [0, 2, 3]), ValueError, "one number of sequences"),
        (lambda: MaskInfo.from_random(1, 2, sparsity=2), ValueError, "sparsity: got 2"),
        (lambda: MaskInfo.causal(2).replace(attention_mask=np.ones((1, 2), bool)), ValueError, "attention_mask"),
    ],
)
def test_refusals_name_argument_got_and_expected(make, error, message):
    with pytest.raises(error, match=message):
        make()
