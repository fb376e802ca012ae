"""What other libraries call the parts of a mask, window modes and windows that are traced, against plain NumPy masks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ejkernel.errors import TracingError
from ejkernel.masks import MaskInfo

SEGMENTS = jnp.array([[1, 1, 2, -1], [0, 0, 0, -1]])


def test_lengths():
    assert MaskInfo.from_segments([[0, 0, -1], [0, -1, -1]]).q_lens.tolist() == [2, 1]
    assert MaskInfo.from_segments([[0, 0, 1, -1]], [[0, 1, 1, 2]]).kv_lens.tolist() == [1, 2, 1]
    assert MaskInfo.from_segments(SEGMENTS).q_lens.tolist() == [3, 2, 1]
    assert MaskInfo.from_lengths([2, 3], 4).kv_lens.tolist() == [2, 3]
    assert MaskInfo.from_attention_mask(np.tri(4, dtype=bool)[None]).q_lens.tolist() == [4]
    assert MaskInfo().q_lens is None
    with pytest.raises(TracingError, match="kv_lens: how many segments there are is not known while tracing"):
        jax.jit(lambda segments: MaskInfo.from_segments(segments).kv_lens)(SEGMENTS)


def test_several_or_the_same_sequence():
    assert bool(MaskInfo.from_segments(SEGMENTS).is_multi_sequence)
    assert not bool(jax.jit(lambda segments: MaskInfo.from_segments(segments).is_multi_sequence)(SEGMENTS[1:]))
    assert not bool(MaskInfo.from_lengths([2], 3).is_multi_sequence)
    assert bool(MaskInfo.from_segments(SEGMENTS).is_self_attention())
    assert not bool(MaskInfo.from_segments([[1, 2]], [[1, 1, 2, 2]]).is_self_attention())
    assert not bool(jax.jit(lambda x: MaskInfo.from_segments(x, x + 1).is_self_attention())(SEGMENTS))
    assert bool(MaskInfo.from_random(1, 4).is_self_attention()) and not bool(MaskInfo.from_random(1, 4, 5).is_self_attention())
    assert not bool(MaskInfo().is_self_attention())


def test_masks_of_queries_keys_and_pairs():
    queries, keys, seen = MaskInfo.from_segments(SEGMENTS).apply_causal().get_qkv_masks(jnp.int32)
    assert queries.tolist() == keys.tolist() == [[1, 1, 1, 0], [1, 1, 1, 0]]
    assert seen.dtype == jnp.int32 and seen[0, 0].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0] * 4]
    with pytest.raises(ValueError, match="sizes for get_or_compute_segment_ids: got T=None"):
        MaskInfo(causal=True).get_qkv_masks()
    queries, keys = MaskInfo.from_segments([[1, 1, 2, 2, -1]]).get_or_compute_positions()
    assert queries.tolist() == [[0, 1, 0, 1, -1]] and keys.tolist() == [[0, 1, 0, 1, 2**31 - 1]]


def test_dtype_of_the_view_and_nothing_else():
    info = MaskInfo.from_segments(SEGMENTS).apply_causal()
    converted = jax.jit(lambda info: info.to_dtype(jnp.float32))(info)
    assert converted.attention_mask.dtype == jnp.float32 and info.attention_mask.dtype == jnp.bool_
    np.testing.assert_array_equal(converted.attention_mask, info.attention_mask)
    assert converted.dense is None and converted.materialize().dtype == jnp.bool_
    np.testing.assert_array_equal(converted.create_bias(), info.bias)
    stored = info.materialize_attention_mask(jnp.int32)
    assert stored.dense.dtype == jnp.bool_ and stored.attention_mask.dtype == jnp.int32
    np.testing.assert_array_equal(stored.attention_mask, info.attention_mask)


def test_padding_masks_and_positions_in_constructors():
    padding = MaskInfo.from_segments(jnp.array([[1, 1, 0]]), is_attn_mask=True)
    np.testing.assert_array_equal(padding.attention_mask[0, 0], [[1, 1, 0], [1, 1, 0], [0, 0, 0]])
    positions = jnp.array([[4, 5, 6]])
    for info in (
        MaskInfo.from_random(1, 3, q_positions=positions, kv_positions=positions),
        MaskInfo.from_lengths([3], 3, q_positions=positions, kv_positions=positions),
        MaskInfo.from_attention_mask(np.ones((1, 3, 3), bool), positions, positions),
        MaskInfo(q_positions=positions, kv_positions=positions),
    ):
        assert info.q_positions.tolist() == info.kv_positions.tolist() == positions.tolist()
    with pytest.raises(ValueError, match="query_positions and q_positions: got both"):
        MaskInfo(query_positions=positions, q_positions=positions)


def window(left: int | None, right: int | None, length: int = 10, offset: int = 0) -> np.ndarray:
    row, column = np.arange(length)[:, None] + offset, np.arange(length)
    return ((column >= row - left) if left is not None else True) & ((column <= row + right) if right is not None else True)


def test_modes_of_windows():
    info = MaskInfo.from_segments(np.zeros((2, 10), np.int32))
    decoded = info.apply_sliding_window((2, 1), mode="decode", index=jnp.array([4, 9]))
    assert decoded.shape == (2, 1, 4) and decoded.sliding_window_baked_in
    assert decoded.attention_mask[:, 0, 0].tolist() == [window(2, 1)[4, 2:6].tolist(), window(2, 1)[9, 6:].tolist()]
    traced = jax.jit(lambda index: info.apply_sliding_window(3, mode="decode", index=index).attention_mask)
    assert traced(0).shape == (2, 1, 1, 7) and traced(0)[0, 0, 0].tolist() == window(3, 3)[0, :7].tolist()
    causal = info.apply_causal().apply_sliding_window((3, 0), mode="prefill")
    np.testing.assert_array_equal(causal.attention_mask[0, 0], (window(3, 0) & np.tri(10, dtype=bool))[:, 6:])
    np.testing.assert_array_equal(info.apply_sliding_window(4, mode="prefill").attention_mask[1, 0], window(4, 4)[:, 6:])
    moved = MaskInfo(query_positions=[[7, 8, 9]], key_positions=[[7, 8, 9]]).apply_sliding_window(
        (1, 0), mode="decode", index=2
    )
    assert moved.q_positions.tolist() == [[9]] and moved.kv_positions.tolist() == [[8, 9]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "train"}, "mode: got 'train', expected 'default', 'decode' or 'prefill'"),
        ({"mode": "decode"}, "index: got None, expected the place of the query"),
        ({"index": 3}, "index: got 3, expected None but for 'decode'"),
        ({"sliding_window": (2, None), "mode": "prefill"}, r"sliding_window: got \(2, None\), expected a window with two ends"),
    ],
)
def test_wrong_modes(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        MaskInfo.from_lengths([3], 5).apply_sliding_window(**{"sliding_window": 2, **arguments})


@pytest.mark.parametrize("before", ["nothing", "causal", "offset"])
def test_traced_windows_and_chunks(before: str):
    """What is said in arrays joins the dense mask; everything else stays as it was said."""
    info = MaskInfo.from_segments(np.zeros((1, 10), np.int32))
    start = {"nothing": info, "causal": info.apply_causal(), "offset": info.apply_causal(2)}[before]
    seen = np.asarray(start.attention_mask[0, 0])

    @jax.jit
    def windowed(left: Any, right: Any) -> Any:
        both = start.apply_sliding_window((left, right))
        return both.attention_mask[0, 0], start.apply_sliding_window((left, None), offset=1).attention_mask[0, 0]

    both, one = windowed(2, 1)
    np.testing.assert_array_equal(both, seen & window(2, 1))
    np.testing.assert_array_equal(one, seen & window(2, None, offset=1))
    equal = jax.jit(lambda w: start.apply_sliding_window(w).attention_mask[0, 0])(3)
    np.testing.assert_array_equal(equal, start.apply_sliding_window(3).attention_mask[0, 0])
    chunked = jax.jit(lambda size: start.apply_chunked(size).attention_mask[0, 0])
    for size in (3, 4):
        np.testing.assert_array_equal(chunked(size), start.apply_chunked(size).attention_mask[0, 0])
    assert start.apply_sliding_window(jnp.int32(2)).causal is start.causal
    with pytest.raises(ValueError, match="sliding_window: got float32"):
        start.apply_sliding_window((jnp.float32(2), 0))
    with pytest.raises(ValueError, match="sizes for apply_"):
        MaskInfo(causal=True).apply_sliding_window(jnp.int32(2))


def test_shardings():
    mesh = jax.sharding.AbstractMesh((2, 2, 2), ("dp", "tp", "sp"))
    info = MaskInfo.from_segments(np.zeros((4, 6), np.int32), batch_axis_name="dp")
    spec = info.get_shardings(mesh=mesh)
    assert spec.q_segment_ids == spec.kv_segment_ids == PartitionSpec("dp", None)
    assert spec.attention_mask is None and spec.cu_seqlens_q is None
    dense = MaskInfo.from_random(3, 6, batch_axis_name=("dp",)).get_shardings(True, mesh=mesh)
    assert dense.attention_mask == PartitionSpec(None, None, "sp", None)  # 3 examples and 1 head are not split
    assert info.get_shardings(sequence_parallel=True, mesh=mesh).q_segment_ids == PartitionSpec("dp", "sp")
    assert MaskInfo.get_empty_sharding() == (None,) * 7
    with pytest.raises(ValueError, match=r"batch_axis_name: got .* expected axes of the mesh; set it with replace"):
        MaskInfo.from_random(2, 4).get_shardings(mesh=mesh)
