"""Every part of a mask, and every combination, against the definition written entry by entry."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import mask_oracle
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ejkernel import MaskInfo

B, H, T, S = 2, 2, 5, 7
SIZES = (B, T, S)


def array(shape, low, high):
    size = int(np.prod(shape))
    return st.lists(st.integers(low, high), min_size=size, max_size=size).map(lambda values: np.reshape(values, shape))


def maybe(strategy):
    return st.none() | strategy


side = st.none() | st.integers(0, 4)
masks = st.fixed_dictionaries(
    {
        "dense": maybe(
            st.sampled_from([(B, H, T, S), (B, 1, T, S), (1, 1, 1, S), (1, H, T, 1)]).flatmap(lambda s: array(s, 0, 1))
        ),
        "query_segments": maybe(array((B, T), -2, 2)),
        "key_segments": maybe(array((B, S), -2, 2)),
        "query_positions": maybe(array((B, T), 0, 6)),
        "key_positions": maybe(array((B, S), 0, 6)),
        "query_lengths": maybe(array((B,), 0, T)),
        "key_lengths": maybe(array((B,), 0, S)),
        "causal": st.booleans(),
        "causal_offset": st.integers(-2, 3),
        "window": st.none() | st.integers(0, 4) | st.tuples(side, side),
        "chunk_size": st.none() | st.integers(1, 4),
        "prefix": st.none() | st.integers(0, 4),
    }
).map(lambda fields: MaskInfo(sizes=SIZES, **fields | {"dense": None if fields["dense"] is None else fields["dense"] > 0}))


def seen(info, queries=T, keys=S):
    return np.asarray(jnp.broadcast_to(info.materialize(), (B, H, queries, keys)))


@given(masks)
@settings(max_examples=60, deadline=None)
def test_materialized_mask_is_the_definition(info):
    np.testing.assert_array_equal(seen(info), mask_oracle.dense(info, B, H, T, S))


@given(masks)
@settings(max_examples=40, deadline=None)
def test_resolved_mask_sees_the_same_with_fewer_kinds_of_parts(info):
    small = info.resolved(T, S)
    assert small.query_lengths is None and small.key_lengths is None
    assert (small.query_segments is None) == (small.key_segments is None)
    assert (small.query_positions is None) == (small.key_positions is None)
    assert small.query_positions is None or small.causal_offset == 0
    np.testing.assert_array_equal(mask_oracle.dense(small, B, H, T, S), mask_oracle.dense(info, B, H, T, S))


@given(masks, st.integers(-2, 3))
@settings(max_examples=40, deadline=None)
def test_apply_causal_is_a_conjunction(info, offset):
    only = MaskInfo(
        causal=True,
        causal_offset=offset,
        prefix=info.prefix,
        query_positions=info.query_positions,
        key_positions=info.key_positions,
    )
    expected = mask_oracle.dense(info, B, H, T, S) & mask_oracle.dense(only, B, H, T, S)
    np.testing.assert_array_equal(seen(info.apply_causal(offset)), expected)
    np.testing.assert_array_equal(seen(info.apply_causal(jnp.array([offset, offset]))), expected)


@given(masks, st.integers(0, 3) | st.tuples(side, side), st.integers(-1, 2))
@settings(max_examples=40, deadline=None)
def test_apply_sliding_window_is_a_conjunction(info, window, offset):
    only = MaskInfo(window=window, causal_offset=offset, query_positions=info.query_positions, key_positions=info.key_positions)
    expected = mask_oracle.dense(info, B, H, T, S) & mask_oracle.dense(only, B, H, T, S)
    np.testing.assert_array_equal(seen(info.apply_sliding_window(window, offset=offset)), expected)


@given(masks, st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_apply_chunked_is_a_conjunction(info, size):
    at = {"query_positions": info.query_positions, "key_positions": info.key_positions}
    expected = mask_oracle.dense(info, B, H, T, S)
    expected = expected & mask_oracle.dense(MaskInfo(chunk_size=size, **at), B, H, T, S)
    expected = expected & mask_oracle.dense(MaskInfo(causal=True, prefix=info.prefix, **at), B, H, T, S)
    np.testing.assert_array_equal(seen(info.apply_chunked(size)), expected)


@given(masks, array((B,), 0, S), array((B,), 0, S), st.sampled_from([0, 1, 3, T]), st.sampled_from([None, 2, S + 1]))
@settings(max_examples=40, deadline=None)
def test_apply_kv_lengths_cuts_the_definition(info, lengths, end, q_len, width):
    full = mask_oracle.dense(info, B, H, T, S) & (np.arange(S) < lengths[:, None])[:, None, None]
    np.testing.assert_array_equal(seen(info.apply_kv_lengths(lengths)), full)
    cut = info.apply_kv_lengths(lengths, q_len=q_len, end_index=end, sliding_window=width)
    keys = S if width is None else min(width, S)
    expected = []
    for b in range(B):
        row = min(max(end[b] - q_len, 0), T - q_len)
        column = min(max(end[b] - keys, 0), S - keys)
        expected.append(full[b, :, row : row + q_len, column : column + keys])
    np.testing.assert_array_equal(seen(cut, q_len, keys), np.stack(expected))


@given(masks)
@settings(max_examples=30, deadline=None)
def test_segment_ids_never_change_the_mask(info):
    stored = info.materialize_segment_ids()
    np.testing.assert_array_equal(seen(stored), mask_oracle.dense(info, B, H, T, S))
    assert stored.query_segments.shape[1] == T and stored.key_segments.shape[1] == S


@given(masks)
@settings(max_examples=30, deadline=None)
def test_reading_changes_nothing(info):
    before = jax.tree.flatten(info)
    names = ("attention_mask", "q_segment_ids", "kv_segment_ids", "q_attention_mask", "q_position_ids", "kv_positions", "shape")
    for name in names:
        getattr(info, name)
    info.create_bias()
    info.get_or_compute_attention_mask(jnp.int32)
    after = jax.tree.flatten(info)
    assert before[1] == after[1]
    assert all(one is two for one, two in zip(before[0], after[0], strict=True))
    assert set(vars(info)) == set(vars(MaskInfo()))


def test_tokens_of_equal_type_open_within_segments_only():
    info = MaskInfo.from_attention_mask([[1, 1, 1, 0]]).apply_causal()
    types = [[1, 1, 0, 1]]
    union = info.apply_token_type_ids(types)
    np.testing.assert_array_equal(union.attention_mask[0, 0], [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    both = info.apply_token_type_ids(types, combine="intersect", zero_policy="none")
    np.testing.assert_array_equal(both.attention_mask[0, 0], [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]])
    alone = info.apply_token_type_ids(types, combine="replace", zero_policy="kv")
    np.testing.assert_array_equal(alone.attention_mask[0, 0], [[1, 1, 0, 1], [1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 0, 1]])
    cross = MaskInfo(sizes=(1, 2, 3)).apply_token_type_ids(([[1, 2]], [[2, 1, 0]]), combine="intersect", zero_policy="both")
    np.testing.assert_array_equal(cross.attention_mask[0, 0], [[0, 1, 0], [1, 0, 0]])
    with pytest.raises(ValueError, match="combine: got 'xor'"):
        info.apply_token_type_ids(types, combine="xor")


@pytest.mark.parametrize(
    ("before", "apply", "static"),
    [
        ({}, lambda info: info.apply_causal(2), {"causal": True, "causal_offset": 2}),
        ({"causal": True, "causal_offset": 1}, lambda info: info.apply_causal(), {"causal": True, "causal_offset": 0}),
        ({"causal": True}, lambda info: info.apply_sliding_window(2), {"window": (2, 2), "causal": True}),
        ({"window": (3, None)}, lambda info: info.apply_sliding_window((5, 1)), {"window": (3, 1)}),
        ({"causal": True, "chunk_size": 4}, lambda info: info.apply_chunked(2), {"chunk_size": 2, "causal": True}),
        ({"causal": True, "chunk_size": 2}, lambda info: info.apply_chunked(4), {"chunk_size": 2, "causal": True}),
    ],
)
def test_structure_that_can_stay_static_does(before, apply, static):
    result = apply(MaskInfo(**before))
    assert {name: getattr(result, name) for name in static} == static
    assert result.dense is None


def test_structure_that_cannot_stay_static_becomes_dense():
    result = MaskInfo.causal(4, offset=1).apply_sliding_window(1)
    assert result.causal and result.causal_offset == 1 and result.window is None
    np.testing.assert_array_equal(result.attention_mask[0, 0], [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]])
    with pytest.raises(ValueError, match="use materialize"):
        MaskInfo.causal(offset=1).apply_sliding_window(1)
