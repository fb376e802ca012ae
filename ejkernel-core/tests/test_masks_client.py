"""The surface that EasyDeL uses, with the values it relies on."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types import MaskInfo


def same(array, expected, dtype=None):
    np.testing.assert_array_equal(np.asarray(array), expected)
    if dtype is not None:
        assert array.dtype == dtype


def test_dynamic_init_from_a_padding_mask():
    info = MaskInfo.dynamic_init(attention_mask=jnp.array([[0, 1, 1, 1]]))
    expected = np.zeros((1, 1, 4, 4), bool)
    expected[..., 1:, 1:] = True
    same(info.attention_mask, expected, jnp.bool_)
    same(info.q_segment_ids, [[-1, 0, 0, 0]], jnp.int32)
    same(info.kv_segment_ids, [[-1, 0, 0, 0]], jnp.int32)
    same(info._kv_segment_ids, [[-1, 0, 0, 0]])
    same(info._q_segment_ids, [[-1, 0, 0, 0]])
    same(info.q_position_ids, [[-1, 0, 1, 2]], jnp.int32)
    same(info.q_attention_mask, [[0, 1, 1, 1]])
    assert info.kv_len == 4 and info.shape == (1, 4, 4) and info.kv_positions is None


def test_dynamic_init_without_a_mask_restricts_nothing():
    for info in (
        MaskInfo.dynamic_init(input_ids=jnp.zeros((2, 3), jnp.int32)),
        MaskInfo.dynamic_init(inputs_embeds=jnp.zeros((2, 3, 8))),
    ):
        assert jax.tree.leaves(info) == []
        same(info.attention_mask, np.ones((2, 1, 3, 3), bool))
        same(info.q_segment_ids, np.zeros((2, 3)), jnp.int32)
        same(info.q_position_ids, [[0, 1, 2]] * 2)
    assert MaskInfo.dynamic_init(mask_info=info) is info
    with pytest.raises(ValueError, match="one of them"):
        MaskInfo.dynamic_init()


def test_zero_is_a_segment_and_positions_restart():
    info = MaskInfo.from_segments(jnp.array([[1, 1, 2, 0]]))
    same(info.attention_mask[0, 0], [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    same(info.q_position_ids, [[0, 1, 0, 0]])
    same(MaskInfo.from_segments([[0, -1, 0, -7, 3, 3]]).q_position_ids, [[0, -1, 1, -1, 0, 1]])


def test_client_spellings():
    info = MaskInfo.from_segments(
        q_segment_ids=[[1, 2]], kv_segment_ids=[[2, 1, 1]], q_positions=[[4, 5]], kv_positions=[[5, 3, 9]]
    )
    same(info.attention_mask[0, 0], [[0, 1, 1], [1, 0, 0]])
    same(info.q_position_ids, [[4, 5]])
    same(info.kv_positions, [[5, 3, 9]])
    same(info.apply_causal().attention_mask[0, 0], [[0, 1, 0], [1, 0, 0]])
    with pytest.raises(ValueError, match="query_segments and q_segment_ids: got both"):
        MaskInfo.from_segments([[0]], q_segment_ids=[[0]])
    dense = jnp.array([[1, 1, 1, 0], [1, 1, 1, 0]]) == 1
    private = MaskInfo(_attention_mask=dense[None, None])
    same(private.q_segment_ids, [[0, 0]])
    same(private.kv_segment_ids, [[0, 0, 0, -1]])


def test_from_attention_mask_by_rank():
    flat = MaskInfo.from_attention_mask(jnp.array([[1, 1, 1, 0]]), kv_positions=jnp.arange(4)[None])
    same(flat.q_segment_ids, [[0, 0, 0, -1]], jnp.int32)
    same(flat.kv_positions, [[0, 1, 2, 3]])
    assert flat.attention_mask.shape == (1, 1, 4, 4)
    assert MaskInfo.from_attention_mask(np.ones((2, 3, 4), bool)).dense.shape == (2, 1, 3, 4)
    assert MaskInfo.from_attention_mask(np.ones((2, 5, 3, 4), bool)).dense.shape == (2, 5, 3, 4)


def test_causal_then_window_and_chunks():
    banded = MaskInfo.from_segments(jnp.zeros((1, 4), jnp.int32)).apply_causal().apply_sliding_window(1)
    same(banded.attention_mask[0, 0], np.tri(4) - np.tri(4, k=-2))
    assert banded.sliding_window_baked_in
    chunked = MaskInfo.from_segments(jnp.zeros((1, 4), jnp.int32)).apply_chunked(2)
    same(chunked.attention_mask[0, 0], [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]])
    same(chunked.q_segment_ids, [[0, 0, 0, 0]])


def test_decode_step():
    info = MaskInfo.from_segments(jnp.zeros((1, 6), jnp.int32)).apply_causal()
    step = info.apply_kv_lengths(kv_lengths=jnp.array([3]), q_len=1, end_index=jnp.array([3]))
    same(step.attention_mask, [[[[1, 1, 1, 0, 0, 0]]]])
    same(step.kv_segment_ids, [[0, 0, 0, -1, -1, -1]])
    same(step.q_position_ids, [[2]])
    cut = info.apply_kv_lengths(kv_lengths=jnp.array([3]), q_len=1, end_index=jnp.array([3]), sliding_window=2)
    same(cut.attention_mask, [[[[1, 1]]]])
    same(cut.kv_positions, [[1, 2]])
    assert cut.sliding_window_baked_in and cut.kv_len == 2
    with pytest.raises(TypeError, match="sliding_window: got \\(2, 2\\), expected an int"):
        info.apply_kv_lengths(kv_lengths=jnp.array([3]), q_len=1, end_index=jnp.array([3]), sliding_window=(2, 2))


@pytest.mark.parametrize("window", [None, 1, 2, 4, 6, 9])
@pytest.mark.parametrize("lengths", [(1, 1), (5, 3), (6, 6)])
@pytest.mark.parametrize("queries", [1, 2, 6])
def test_a_step_with_a_cache_by_its_definition(window, lengths, queries):
    """The cut's columns are the cached keys, per example; the second example begins with padding."""
    valid = np.array([[1] * 6, [0, 0, 1, 1, 1, 1]], bool)
    whole = valid[:, :, None] & valid[:, None, :] & np.tri(6, dtype=bool)
    whole &= np.arange(6) < np.array(lengths)[:, None, None]
    info = MaskInfo.from_attention_mask(jnp.asarray(valid)).apply_causal()
    ends = jnp.array(lengths)
    step = info.apply_kv_lengths(kv_lengths=ends, q_len=queries, end_index=ends, sliding_window=window)
    for example, length in enumerate(lengths):
        row, width = max(length - queries, 0), min(window or 6, 6)
        column = max(length - width, 0)
        expected = whole[example, row : row + queries, column : column + width]
        same(step.attention_mask[example, 0], expected)
        same(step.q_position_ids[example], np.arange(row, row + queries))
        same(step.kv_positions[example], np.arange(column, column + width))


@pytest.mark.parametrize("length", range(1, 13))
def test_a_window_after_the_cut_still_knows_the_positions(length):
    """Not the columns, which start at 0 again: of 5 cached keys a window of 2 sees the newest 3, however long the sequence is."""
    ends = jnp.array([length])
    info = MaskInfo.from_segments(jnp.zeros((1, 12), jnp.int32)).apply_causal()
    cut = info.apply_kv_lengths(kv_lengths=ends, q_len=1, end_index=ends, sliding_window=5)
    first = max(length - 5, 0)
    seen = [max(length - 3, 0) <= key < length for key in range(first, first + 5)]
    same(cut.apply_sliding_window(2).attention_mask, [[[seen]]])
    uncut = info.apply_kv_lengths(kv_lengths=ends, q_len=1, end_index=ends).apply_sliding_window(2)
    same(uncut.attention_mask, [[[[max(length - 3, 0) <= key < length for key in range(12)]]]])


def test_bias_is_finite():
    bias = MaskInfo.causal(2).create_bias(jnp.float32)
    same(bias[0, 0], [[0, np.finfo(np.float32).min], [0, 0]], jnp.float32)
    assert MaskInfo.causal(2).create_bias(jnp.bfloat16)[0, 0, 0, 1] == jnp.finfo(jnp.bfloat16).min


def test_replacing_the_mask_that_was_read():
    info = MaskInfo.from_segments([[0, 0, 0, -1]]).apply_causal()
    opened = info.replace(attention_mask=jnp.ones((1, 1, 4, 4), bool), sliding_window_baked_in=True, kv_segment_ids=None)
    assert not opened.causal and opened.sliding_window_baked_in
    same(opened.attention_mask[0, 0], [[1, 1, 1, 0]] * 3 + [[0] * 4])
    round_trip = info.replace(attention_mask=info.attention_mask)
    same(round_trip.attention_mask, info.attention_mask)
    step = info.replace(attention_mask=jnp.ones((1, 1, 1, 8), bool), kv_segment_ids=jnp.array([[0] * 6 + [-1] * 2]))
    same(step.attention_mask, [[[[1] * 6 + [0] * 2]]])
    assert step.shape == (1, 1, 8) and step.query_segments is None
    same(info.replace(kv_positions=[[7, 7, 7, 7]]).kv_positions, [[7, 7, 7, 7]])
    assert info.replace(query_segments=None).query_segments is None
    assert info.replace(batch_axis_name="data").batch_axis_name == "data"


def test_clients_may_hang_flags_on_it():
    info = MaskInfo.causal(4)
    object.__setattr__(info, "_causal_baked", True)
    assert info._causal_baked is True
    assert getattr(jax.tree.map(lambda x: x, info), "_causal_baked", False) is False
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.window = (1, 1)


def test_leaves_are_the_arrays_that_were_given():
    info = MaskInfo(query_segments=[[0]], key_lengths=[1], causal=True, window=3)
    leaves, tree = jax.tree.flatten(info)
    assert [leaf.dtype for leaf in leaves] == [jnp.int32, jnp.int32]
    again = jax.tree.unflatten(tree, leaves)
    assert again.causal is True and again.window == (3, 3) and again.batch_axis_name == ("dp", "fsdp")
    assert (again.qheads_axis_name, again.kvheads_axis_name, again.sequence_axis_name) == ("tp", "tp", "sp")
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(info)]
    assert paths == [".query_segments", ".key_lengths"]
    assert hash(tree) == hash(jax.tree.structure(info)) and tree != jax.tree.structure(info.replace(causal=False))


def test_copies():
    info = MaskInfo.from_segments([[0, 1]]).apply_causal()
    for other in (copy.deepcopy(info), pickle.loads(pickle.dumps(info)), dataclasses.replace(info)):
        same(other.attention_mask, info.attention_mask)


def test_the_name_causal_makes_masks_on_the_class_and_tells_on_the_instance():
    assert MaskInfo.causal(2, 3, offset=1).causal is True
    assert MaskInfo().causal is False
    same(MaskInfo.causal(2, 3, offset=1).attention_mask[0, 0], [[1, 1, 0], [1, 1, 1]])
    assert MaskInfo.causal(2).window is None and MaskInfo.causal(2, window=1).window == (1, 1)


def test_visualize():
    info = MaskInfo.from_cu_seqlens([0, 2, 3], total_length=4, causal=True)
    expected = ["4 queries x 4 keys, 25.0% visible", "  | 0 1 2 3", "0 | 1 0 0 0", "1 | 1 1 0 0", "2 | 0 0 1 0", "3 | 0 0 0 0"]
    assert info.visualize().splitlines() == expected
    assert info.visualize(compact=True).splitlines() == ["#...", "##..", "..#.", "...."]
    big = MaskInfo.causal(100)
    assert big.visualize(max_rows=2, max_cols=3).splitlines() == [
        "100 queries x 100 keys, 50.5% visible, sampled",
        "   |  0 50 99",
        " 0 |  1  0  0",
        "99 |  1  1  1",
    ]
    assert big.visualize(compact=True, max_rows=2, max_cols=2) == "+.\n#+"
    assert MaskInfo.causal().visualize(1, 2).splitlines()[-1] == "0 | 1 0"
    with pytest.raises(ValueError, match="call visualize outside jit"):
        jax.jit(lambda info: jnp.asarray(len(info.visualize())))(info)
    with pytest.raises(ValueError, match="batch: got 3"):
        MaskInfo.from_random(2, 3).visualize(batch=3)
    assert repr(MaskInfo.causal(2, window=1)) == "MaskInfo(causal=True, window=(1, 1), sizes=(None, 2, 2))"


def test_from_random():
    info = MaskInfo.from_random(2, 64, 32, sparsity=0.75)
    assert info.dense.shape == (2, 1, 64, 32) and bool(info.dense.any(axis=-1).all())
    assert 0.2 < float(info.dense.mean()) < 0.32
    same(info.dense, MaskInfo.from_random(2, 64, 32, sparsity=0.75, seed=0).dense)
    assert not np.array_equal(info.dense, MaskInfo.from_random(2, 64, 32, sparsity=0.75, seed=1).dense)
    same(MaskInfo.from_random(1, 3, sparsity=1.0).dense[0, 0], np.eye(3))


def test_mask_in_another_dtype_and_segments_that_are_stored():
    info = MaskInfo.from_attention_mask(jnp.array([[1, 1, 0]]))
    same(info.get_or_compute_attention_mask(dtype=jnp.int32), [[[[1, 1, 0], [1, 1, 0], [0, 0, 0]]]], jnp.int32)
    stored = MaskInfo(_attention_mask=info.attention_mask).materialize_segment_ids()
    same(stored._q_segment_ids, [[0, 0, -1]], jnp.int32)
    same(stored._kv_segment_ids, [[0, 0, -1]], jnp.int32)
    same(stored.attention_mask, info.attention_mask)


def test_token_types():
    causal = MaskInfo.from_attention_mask(jnp.ones((1, 3), jnp.int32)).apply_causal()
    both = causal.apply_token_type_ids(jnp.array([[0, 1, 1]]))
    visible = np.asarray(both.attention_mask)[0, 0]
    assert visible[1, 2] and visible[2, 1], "tokens of one type see each other both ways"
    assert visible[1, 0] and not visible[0, 1], "elsewhere the causal mask holds"
