"""The forward kernel: a program owns a block of queries of one head and loops over the keys that they see, with online softmax
(Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; Dao et al., FlashAttention, 2022).

Full tiles are computed without masks. If the result holds NaN, which a masked value can cause as 0 * NaN, the block is
recomputed on the NaN-safe path: a non-finite value becomes NaN in its key's logits, which propagates exactly to the queries
that see it.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
# ruff: noqa: SIM102 - static and dynamic conditions stay apart
import triton
import triton.language as tl

from ejkernel_triton.flash_attention.score_tiles import evaluated
from ejkernel_triton.flash_attention.tiles import (
    any_nan,
    bias_in,
    dot,
    dot_accumulate,
    finite_operand,
    keep_mask,
    key_range,
    load_operand,
    load_range,
    logits_of,
    mask_pointers,
    propagate_nan,
    split_operand,
    store_rows,
    tile_coordinate,
    token_at,
    transpose_operand,
    visible_in,
)


@triton.jit
def online_softmax_update(
    state,
    start,
    stop,
    query,
    p_key,
    p_value,
    p_masks,
    stream_0,
    stream_1,
    o_query,
    queries,
    keys,
    R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MASKED: tl.constexpr,
    NAN_SAFE: tl.constexpr,
):
    """Online-softmax update of `(accumulator, maximum, sum)` with the keys in [start, stop)."""
    b_values, b_max, b_sum = state
    o_block = tl.arange(0, BLOCK_K)
    KEY_STRIDE: tl.constexpr = R.heads // R.group * R.row
    VALUE_STRIDE: tl.constexpr = R.heads // R.group * R.value_row
    for i_place in tl.range(start, stop, BLOCK_K):
        i_key = token_at(p_masks, i_place, R)
        o_start = tl.full((), 0, tl.int64) + i_key
        key = load_operand(p_key + o_start * KEY_STRIDE, o_block, keys - i_key, KEY_STRIDE, R.size, BLOCK_D, MASKED, R)
        b_qk = dot(query, transpose_operand(key, R), R, NAN_SAFE)  # [BLOCK_Q, BLOCK_K]
        o_key = (i_key + o_block)[None, :]
        b_bias, m_visible = 0.0, o_query >= 0
        if MASKED:
            m_visible = visible_in(p_masks, o_query, o_key, queries, keys, R)
        if R.bias >= 0:
            b_bias, m_visible = bias_in(p_masks, m_visible, o_query, o_key, queries, keys, R, NAN_SAFE)
        b_logits, _ = logits_of(b_qk, b_bias, R)
        if R.score is not None:
            b_logits = tl.zeros_like(b_logits) + evaluated(p_masks, b_logits, o_query, o_key, R, "result")
        value = load_operand(
            p_value + o_start * VALUE_STRIDE, o_block, keys - i_key, VALUE_STRIDE, R.value_size, BLOCK_V, MASKED, R
        )
        if NAN_SAFE:
            b_logits += propagate_nan(value[0])[None, :]
            value = finite_operand(value, R)
        if MASKED:
            b_logits = tl.where(m_visible, b_logits, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_logits, axis=1))
        b_shift = b_new_max
        if MASKED or R.bias >= 0 or R.score is not None:  # -inf - -inf is NaN
            b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_weights = tl.exp2(b_logits * R.unit - (b_shift * R.unit)[:, None])
        b_rescale = tl.exp2((b_max - b_shift) * R.unit)
        b_sum = b_sum * b_rescale + tl.sum(b_weights, axis=1)
        if R.dropout:
            b_weights = tl.where(keep_mask(stream_0, stream_1, o_query, o_key, R), b_weights, 0.0)
        b_values = b_values * b_rescale[:, None]
        b_values = dot_accumulate(b_values, split_operand(b_weights, value[0].dtype, R), value, R, NAN_SAFE)
        b_max = b_new_max
    return b_values, b_max, b_sum


@triton.jit
def online_softmax_update_overlapped(
    state,
    start,
    stop,
    query,
    p_key,
    p_value,
    stream_0,
    stream_1,
    o_query,
    R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """`online_softmax_update` without masks. The QK MMA of the next tile overlaps the softmax of the current one."""
    b_values, b_max, b_sum = state
    o_block = tl.arange(0, BLOCK_K)
    KEY_STRIDE: tl.constexpr = R.heads // R.group * R.row
    VALUE_STRIDE: tl.constexpr = R.heads // R.group * R.value_row
    if start < stop:
        o_start = tl.full((), 0, tl.int64) + start
        key = load_operand(p_key + o_start * KEY_STRIDE, o_block, BLOCK_K, KEY_STRIDE, R.size, BLOCK_D, False, R)
        b_qk = dot(query, transpose_operand(key, R), R, False)  # [BLOCK_Q, BLOCK_K]
        for i_key in tl.range(start, stop, BLOCK_K):
            o_start = tl.full((), 0, tl.int64) + i_key
            o_next = tl.minimum(o_start + BLOCK_K, stop - BLOCK_K)
            key = load_operand(p_key + o_next * KEY_STRIDE, o_block, BLOCK_K, KEY_STRIDE, R.size, BLOCK_D, False, R)
            b_next = dot(query, transpose_operand(key, R), R, False)
            b_logits, _ = logits_of(b_qk, 0.0, R)
            b_new_max = tl.maximum(b_max, tl.max(b_logits, axis=1))
            b_weights = tl.exp2(b_logits * R.unit - (b_new_max * R.unit)[:, None])
            b_rescale = tl.exp2((b_max - b_new_max) * R.unit)
            b_sum = b_sum * b_rescale + tl.sum(b_weights, axis=1)
            if R.dropout:
                b_weights = tl.where(keep_mask(stream_0, stream_1, o_query, (i_key + o_block)[None, :], R), b_weights, 0.0)
            value = load_operand(
                p_value + o_start * VALUE_STRIDE, o_block, BLOCK_K, VALUE_STRIDE, R.value_size, BLOCK_V, False, R
            )
            b_values = b_values * b_rescale[:, None]
            b_values = dot_accumulate(b_values, split_operand(b_weights, value[0].dtype, R), value, R, False)
            b_max = b_new_max
            b_qk = b_next
    return b_values, b_max, b_sum


@triton.jit
def forward_kernel(
    p_query,
    p_key,
    p_value,
    p_bias,
    p_mask,
    p_query_segments,
    p_key_segments,
    p_query_positions,
    p_key_positions,
    p_sinks,
    p_streams,
    p_values,
    p_integers,
    p_batch,
    p_head,
    p_ranges,
    queries,
    keys,
    blocks,
    batch_heads,
    heads_in_l2,
    p_out,
    p_lse,
    p_maximum,
    R: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SAVE_LSE: tl.constexpr,
    SAVE_MAXIMUM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    i_block, i_batch_head = tile_coordinate(blocks, batch_heads, heads_in_l2, R.causal)
    i_batch = i_batch_head // R.heads
    i_head = i_batch_head - i_batch * R.heads
    i_first = i_block * BLOCK_Q
    o_block = tl.arange(0, BLOCK_Q)
    o_query = (i_first + o_block)[:, None]
    o_row = i_batch.to(tl.int64) * queries + i_first
    o_key_row = i_batch.to(tl.int64) * keys
    i_key_head = i_head // R.group
    p_key += (o_key_row * (R.heads // R.group) + i_key_head) * R.row
    p_value += (o_key_row * (R.heads // R.group) + i_key_head) * R.value_row
    stream_0, stream_1 = tl.full((), 0, tl.uint32), tl.full((), 0, tl.uint32)
    if R.dropout:
        stream_0, stream_1 = tl.load(p_streams + i_batch_head * 2), tl.load(p_streams + i_batch_head * 2 + 1)

    p_list = p_ranges
    if R.ranges > 0:
        low, full_low, full_high, high, p_list = load_range(p_ranges, i_batch, i_head, blocks, i_block, keys, R)
    else:
        last = tl.minimum(i_first + BLOCK_Q, queries) - 1
        low, full_low, full_high, high = key_range(i_first + R.offset, last + R.offset, keys, BLOCK_K, R)
    p_masks = mask_pointers(
        p_bias, p_mask, p_query_segments, p_key_segments, p_query_positions, p_key_positions, p_list,
        (p_values, p_integers, p_batch, p_head), i_batch, i_head, queries, keys, R,
    )  # fmt: skip

    query = load_operand(
        p_query + (o_row * R.heads + i_head) * R.row, o_block, queries - i_first, R.heads * R.row, R.size, BLOCK_D, True, R
    )
    b_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_Q], tl.float32)
    if R.sinks > 0:
        o_sink = tl.arange(0, BLOCK_N)
        i_row = i_head
        if R.sinks_per_batch:
            i_row = i_batch_head
        b_sinks = tl.load(p_sinks + i_row * R.sinks + o_sink, mask=o_sink < R.sinks, other=float("-inf")).to(tl.float32)
        b_sinks *= 1.4426950408889634 / R.unit
        largest = tl.max(b_sinks, axis=0)
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        b_max = tl.zeros([BLOCK_Q], tl.float32) + largest
        b_sum += tl.sum(tl.exp2((b_sinks - shift) * R.unit), axis=0)

    start = (tl.zeros([BLOCK_Q, BLOCK_V], tl.float32), b_max, b_sum)
    state = start
    if R.has_full_tiles:
        if R.masked_first:
            state = online_softmax_update(
                state, low, full_low, query, p_key, p_value, p_masks, stream_0, stream_1, o_query, queries, keys,
                R, BLOCK_K, BLOCK_D, BLOCK_V, True, False,
            )  # fmt: skip
        if OVERLAP:
            state = online_softmax_update_overlapped(
                state, full_low, full_high, query, p_key, p_value, stream_0, stream_1, o_query, R, BLOCK_K, BLOCK_D, BLOCK_V
            )  # fmt: skip
        else:
            state = online_softmax_update(
                state, full_low, full_high, query, p_key, p_value, p_masks, stream_0, stream_1, o_query, queries, keys,
                R, BLOCK_K, BLOCK_D, BLOCK_V, False, False,
            )  # fmt: skip
    else:
        full_high = low
    state = online_softmax_update(
        state, full_high, high, query, p_key, p_value, p_masks, stream_0, stream_1, o_query, queries, keys,
        R, BLOCK_K, BLOCK_D, BLOCK_V, True, False,
    )  # fmt: skip
    if R.nan_safe:
        if any_nan(state[0]):
            state = online_softmax_update(
                start, low, high, query, p_key, p_value, p_masks, stream_0, stream_1, o_query, queries, keys,
                R, BLOCK_K, BLOCK_D, BLOCK_V, True, True,
            )  # fmt: skip

    b_values, b_max, b_sum = state
    b_divisor = tl.full([BLOCK_Q], 1.0, tl.float32)
    if R.normalize:
        b_divisor = tl.where(b_sum == 0.0, 1.0, b_sum)
    if R.dropout:
        b_values *= R.keep_scale
    b_out = b_values / b_divisor[:, None]
    o_out = (o_row * R.heads + i_head) * R.value_size
    store_rows(p_out + o_out, b_out, o_block, queries - i_first, R.heads * R.value_size, R.value_size, BLOCK_V)
    p_row = o_row * R.heads + i_head + o_block * R.heads
    m_row = i_first + o_block < queries
    if SAVE_LSE:
        b_lse = (b_max * R.unit + tl.log2(tl.where(b_sum == 0.0, 1.0, b_sum))) * 0.6931471805599453
        tl.store(p_lse + p_row, b_lse, mask=m_row)
    if SAVE_MAXIMUM:
        tl.store(p_maximum + p_row, b_max * (R.unit * 0.6931471805599453), mask=m_row)
