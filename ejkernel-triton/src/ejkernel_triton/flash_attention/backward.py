"""The backward kernels. They recompute weights from the log-sum-exp (Dao et al., FlashAttention, 2022) and use no atomics.

A program of `key_gradient_kernel` owns a block of keys of one key head and loops over the queries of its group, for both
gradients, or once per gradient if a program cannot hold both. A program of `query_gradient_kernel` owns a block of queries, one
of `tile_gradient_kernel` a tile of the bias, or of what a score function reads. Each row has two statistics, padded at the end:
`neg_lse`, minus the log-sum-exp in powers of two, and `neg_delta`, so that weight = 2 ** (unit * x + neg_lse) and d_logit =
weight * (d_out . value + neg_delta). Accumulators start from a statistic where it does not change from tile to tile.

As in the forward kernel, a block whose result holds NaN is recomputed on the NaN-safe path: non-finite rows and keys are
replaced by 0 in the MMAs and propagate through the weights to the entries that see them.
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
    finite,
    finite_operand,
    keep_mask,
    key_range,
    load_operand,
    load_range,
    logits_of,
    mask_pointers,
    propagate_nan,
    query_range,
    score_row_stride,
    split_of_range,
    split_operand,
    statistics_pointer,
    store_rows,
    tile_coordinate,
    token_at,
    transpose_operand,
    visible_in,
)


@triton.jit
def scores_minus_lse(left, right, b_neg_lse, R: tl.constexpr, NAN_SAFE: tl.constexpr):
    """`left . right`, accumulated onto the statistic if possible (`fuse_lse`)."""
    if R.fuse_lse:
        b_sum = tl.zeros([left[0].shape[0], right[0].shape[1]], tl.float32) + b_neg_lse * (1.0 / R.unit)
        return dot_accumulate(b_sum, left, right, R, NAN_SAFE)
    return dot(left, right, R, NAN_SAFE)


@triton.jit
def d_weights_minus_delta(left, right, b_neg_delta, R: tl.constexpr, NAN_SAFE: tl.constexpr):
    if R.dropout:
        return dot(left, right, R, NAN_SAFE)
    b_sum = tl.zeros([left[0].shape[0], right[0].shape[1]], tl.float32) + b_neg_delta
    return dot_accumulate(b_sum, left, right, R, NAN_SAFE)


@triton.jit
def weights_of(
    b_qk, b_neg_lse, p_masks, stream_0, stream_1, o_query, o_key, queries, keys,
    R: tl.constexpr, MASKED: tl.constexpr, NAN_SAFE: tl.constexpr, STARTED: tl.constexpr, DERIVATIVE: tl.constexpr = None,
):  # fmt: skip
    """Weights, derivative of a logit by its score, visibility mask and dropout keep mask. STARTED: `scores_minus_lse` computed
    b_qk. DERIVATIVE: another one in its place, see `program_of`."""
    m_visible, b_keep, b_slope = o_query >= 0, o_query >= 0, 1.0
    if MASKED:
        m_visible = visible_in(p_masks, o_query, o_key, queries, keys, R)
    b_bias = 0.0
    if R.bias >= 0:
        b_bias, m_visible = bias_in(p_masks, m_visible, o_query, o_key, queries, keys, R, NAN_SAFE)
    b_logits, b_tangent = logits_of(b_qk, b_bias, R)
    b_scores = b_logits
    if R.score is not None:
        b_logits = tl.zeros_like(b_logits) + evaluated(p_masks, b_scores, o_query, o_key, R, "result")
        m_visible = m_visible & (b_logits != float("-inf"))
    b_exponents = b_logits * R.unit
    if STARTED:
        if not R.fuse_lse:
            b_exponents += b_neg_lse
    else:
        b_exponents += b_neg_lse
    b_weights = tl.exp2(b_exponents)
    if R.capped:
        b_slope = 1.0 - b_tangent * b_tangent
    if DERIVATIVE is not None:
        b_slope = evaluated(p_masks, b_scores, o_query, o_key, R, DERIVATIVE)
    elif R.score is not None:
        b_slope = b_slope * evaluated(p_masks, b_scores, o_query, o_key, R, "slope")
    if MASKED:
        b_weights = tl.where(m_visible, b_weights, 0.0)
    if R.dropout:
        b_keep = keep_mask(stream_0, stream_1, o_query, o_key, R)
    return b_weights, b_slope, m_visible, b_keep


@triton.jit
def apply_dropout(b_weights, b_keep, R: tl.constexpr):
    """Weights after dropout, without the keep scale."""
    if R.dropout:
        b_weights = tl.where(b_keep, b_weights, 0.0)
    return b_weights


@triton.jit
def d_logits_of(
    b_weights, b_slope, m_visible, b_keep, b_d_weights, b_neg_delta,
    R: tl.constexpr, MASK_GRADIENT: tl.constexpr, STARTED: tl.constexpr,
):  # fmt: skip
    """d_logits. MASK_GRADIENT: mask them even where a weight of 0 meets a non-finite value. STARTED: `d_weights_minus_delta`
    computed b_d_weights."""
    if R.dropout:
        b_d_weights = tl.where(b_keep, b_d_weights * R.keep_scale, 0.0) + b_neg_delta
    else:
        if not STARTED:
            b_d_weights += b_neg_delta
    b_d_logits = b_weights * b_d_weights
    if R.capped or R.score is not None:
        b_d_logits = b_d_logits * b_slope
    if MASK_GRADIENT:
        b_d_logits = tl.where(m_visible, b_d_logits, 0.0)
    return b_d_logits


@triton.jit
def add_queries(
    state, start, stop, key, value, p_query, p_d_out, p_neg_lse, p_neg_delta, p_masks, stream_0, stream_1, o_key, queries,
    keys, R: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, MASKED: tl.constexpr,
    NAN_SAFE: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    """Accumulate `(d_key, d_value)` over the queries in [start, stop) of one head. Scores are `[keys, queries]`."""
    b_d_key, b_d_value = state
    o_block = tl.arange(0, BLOCK_Q)
    STRIDE: tl.constexpr = R.heads * R.row
    OUT_STRIDE: tl.constexpr = R.heads * R.value_row
    for i_place in tl.range(start, stop, BLOCK_Q):
        i_query = tl.multiple_of(token_at(p_masks, i_place, R), BLOCK_Q)
        o_start = tl.full((), 0, tl.int64) + i_query
        query = load_operand(p_query + o_start * STRIDE, o_block, queries - i_query, STRIDE, R.size, BLOCK_D, MASKED, R)
        d_out = load_operand(
            p_d_out + o_start * OUT_STRIDE, o_block, queries - i_query, OUT_STRIDE, R.value_size, BLOCK_V, MASKED, R
        )
        b_neg_lse = tl.load(p_neg_lse + i_query + o_block)
        b_neg_delta = tl.load(p_neg_delta + i_query + o_block)
        if NAN_SAFE:
            b_nan = propagate_nan(query[0]) + propagate_nan(d_out[0]) + b_neg_delta * 0.0
            b_neg_lse = tl.where(b_neg_lse == float("-inf"), b_neg_lse, b_neg_lse + b_nan)
            query, d_out, b_neg_delta = finite_operand(query, R), finite_operand(d_out, R), finite(b_neg_delta)
        b_qk = dot(key, transpose_operand(query, R), R, NAN_SAFE)  # [BLOCK_K, BLOCK_Q]
        if WANTED != "value":
            b_d_weights = dot(value, transpose_operand(d_out, R), R, NAN_SAFE)
        b_weights, b_slope, m_visible, b_keep = weights_of(
            b_qk, b_neg_lse[None, :], p_masks, stream_0, stream_1, (i_query + o_block)[None, :], o_key, queries, keys,
            R, MASKED, NAN_SAFE, False,
        )  # fmt: skip
        if WANTED != "key":
            dropped_weights = split_operand(apply_dropout(b_weights, b_keep, R), d_out[0].dtype, R)
            b_d_value = dot_accumulate(b_d_value, dropped_weights, d_out, R, NAN_SAFE)
        if WANTED != "value":
            b_d_logits = d_logits_of(
                b_weights, b_slope, m_visible, b_keep, b_d_weights, b_neg_delta[None, :], R, NAN_SAFE, False
            )
            b_d_key = dot_accumulate(b_d_key, split_operand(b_d_logits, query[0].dtype, R), query, R, NAN_SAFE)
    return b_d_key, b_d_value


@triton.jit
def key_gradient_kernel(
    p_query,
    p_key,
    p_value,
    p_bias,
    p_mask,
    p_query_segments,
    p_key_segments,
    p_query_positions,
    p_key_positions,
    p_streams,
    p_values,
    p_integers,
    p_batch,
    p_head,
    p_ranges,
    p_d_out,
    p_neg_lse,
    p_neg_delta,
    queries,
    keys,
    blocks,
    batch_heads,
    heads_in_l2,
    p_d_key,
    p_d_value,
    R: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WANTED: tl.constexpr,
    HEAD_SPLITS: tl.constexpr,
    QUERY_SPLITS: tl.constexpr,
):
    """With splits, `[splits, b, s, k, d]` partial gradients: each of the programs of a block of keys takes a range of the
    queries of some of the heads."""
    KEY_HEADS: tl.constexpr = R.heads // R.group
    SPLITS: tl.constexpr = HEAD_SPLITS * QUERY_SPLITS
    i_block, i_batch_head = tile_coordinate(blocks * SPLITS, batch_heads, heads_in_l2, False)
    i_split = i_block % SPLITS
    i_block = i_block // SPLITS
    i_batch = i_batch_head // KEY_HEADS
    i_key_head = i_batch_head - i_batch * KEY_HEADS
    i_first = i_block * BLOCK_K
    o_block = tl.arange(0, BLOCK_K)
    o_key = (i_first + o_block)[:, None]
    o_row = (i_batch.to(tl.int64) * keys + i_first) * KEY_HEADS + i_key_head
    key = load_operand(p_key + o_row * R.row, o_block, keys - i_first, KEY_HEADS * R.row, R.size, BLOCK_D, True, R)
    value = load_operand(
        p_value + o_row * R.value_row, o_block, keys - i_first, KEY_HEADS * R.value_row, R.value_size, BLOCK_V, True, R
    )
    p_list = p_ranges
    if R.ranges > 0:
        i_head = i_key_head * R.group
        low, full_low, full_high, high, p_list = load_range(p_ranges, i_batch, i_head, blocks, i_block, queries, R)
    else:
        last = tl.minimum(i_first + BLOCK_K, keys) - 1
        low, full_low, full_high, high = query_range(i_first, last, queries, BLOCK_Q, R)

    state = add_group(
        i_batch, i_key_head, i_block, blocks, i_split, low, full_low, full_high, high, key, value, p_query, p_d_out, p_neg_lse,
        p_neg_delta, p_bias, p_mask, p_query_segments, p_key_segments, p_query_positions, p_key_positions, p_list, p_ranges,
        p_streams, (p_values, p_integers, p_batch, p_head), o_key, queries, keys, R, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_V, False,
        WANTED, HEAD_SPLITS, QUERY_SPLITS,
    )  # fmt: skip
    if R.nan_safe:
        if any_nan(state[0]) | any_nan(state[1]):
            state = add_group(
                i_batch, i_key_head, i_block, blocks, i_split, low, full_low, full_high, high, key, value, p_query, p_d_out,
                p_neg_lse, p_neg_delta, p_bias, p_mask, p_query_segments, p_key_segments, p_query_positions, p_key_positions,
                p_list, p_ranges, p_streams, (p_values, p_integers, p_batch, p_head), o_key, queries, keys, R, BLOCK_Q, BLOCK_K,
                BLOCK_D, BLOCK_V, True, WANTED,
                HEAD_SPLITS, QUERY_SPLITS,
            )  # fmt: skip

    if HEAD_SPLITS * QUERY_SPLITS > 1:
        o_row += i_split.to(tl.int64) * batch_heads * keys
    b_d_key, b_d_value = state
    if WANTED != "value":
        b_d_key *= R.scale
        store_rows(p_d_key + o_row * R.size, b_d_key, o_block, keys - i_first, KEY_HEADS * R.size, R.size, BLOCK_D)
    if WANTED != "key":
        if R.dropout:
            b_d_value *= R.keep_scale
        p_d_value += o_row * R.value_size
        store_rows(p_d_value, b_d_value, o_block, keys - i_first, KEY_HEADS * R.value_size, R.value_size, BLOCK_V)


@triton.jit
def add_group(
    i_batch, i_key_head, i_block, blocks, i_split, low, full_low, full_high, high, key, value, p_query, p_d_out, p_neg_lse,
    p_neg_delta, p_bias, p_mask, p_query_segments, p_key_segments, p_query_positions, p_key_positions, p_list, p_ranges,
    p_streams, p_functions, o_key, queries, keys, R: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, NAN_SAFE: tl.constexpr, WANTED: tl.constexpr, HEAD_SPLITS: tl.constexpr,
    QUERY_SPLITS: tl.constexpr,
):  # fmt: skip
    """`(d_key, d_value)` of the query heads of the group, or of this program's split of them."""
    MEMBERS: tl.constexpr = R.group // HEAD_SPLITS
    i_first_head = i_key_head * R.group
    if HEAD_SPLITS > 1:
        i_first_head += i_split % HEAD_SPLITS * MEMBERS
    if QUERY_SPLITS > 1:
        if R.list_heads == 1:
            low, full_low, full_high, high = split_of_range(
                low, full_low, full_high, high, i_split // HEAD_SPLITS, QUERY_SPLITS, BLOCK_Q
            )
    state = (tl.zeros([BLOCK_K, BLOCK_D], tl.float32), tl.zeros([BLOCK_K, BLOCK_V], tl.float32))
    for i_member in range(MEMBERS):
        i_head = i_first_head + i_member
        if R.list_heads > 1:
            low, full_low, full_high, high, p_list = load_range(p_ranges, i_batch, i_head, blocks, i_block, queries, R)
            if QUERY_SPLITS > 1:
                low, full_low, full_high, high = split_of_range(
                    low, full_low, full_high, high, i_split // HEAD_SPLITS, QUERY_SPLITS, BLOCK_Q
                )
        state = add_query_head(
            state, i_batch, i_head, low, full_low, full_high, high, key, value, p_query, p_d_out, p_neg_lse, p_neg_delta,
            p_bias, p_mask, p_query_segments, p_key_segments, p_query_positions, p_key_positions, p_list, p_streams, p_functions,
            o_key, queries, keys, R, BLOCK_Q, BLOCK_D, BLOCK_V, NAN_SAFE, WANTED,
        )  # fmt: skip
    return state


@triton.jit
def add_query_head(
    state, i_batch, i_head, low, full_low, full_high, high, key, value, p_query, p_d_out, p_neg_lse, p_neg_delta, p_bias,
    p_mask, p_query_segments, p_key_segments, p_query_positions, p_key_positions, p_list, p_streams, p_functions, o_key, queries,
    keys, R: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, NAN_SAFE: tl.constexpr,
    WANTED: tl.constexpr,
):  # fmt: skip
    """Accumulate `(d_key, d_value)` over one query head of the group."""
    i_batch_head = i_batch * R.heads + i_head
    o_query_row = i_batch.to(tl.int64) * queries * R.heads + i_head
    p_query += o_query_row * R.row
    p_d_out += o_query_row * R.value_row
    p_neg_lse = statistics_pointer(p_neg_lse, i_batch_head, queries)
    p_neg_delta = statistics_pointer(p_neg_delta, i_batch_head, queries)
    p_masks = mask_pointers(
        p_bias, p_mask, p_query_segments, p_key_segments, p_query_positions, p_key_positions, p_list, p_functions, i_batch,
        i_head, queries, keys, R,
    )  # fmt: skip
    stream_0, stream_1 = tl.full((), 0, tl.uint32), tl.full((), 0, tl.uint32)
    if R.dropout:
        stream_0, stream_1 = tl.load(p_streams + i_batch_head * 2), tl.load(p_streams + i_batch_head * 2 + 1)
    if NAN_SAFE:
        state = add_queries(
            state, low, high, key, value, p_query, p_d_out, p_neg_lse, p_neg_delta, p_masks, stream_0, stream_1, o_key,
            queries, keys, R, BLOCK_Q, BLOCK_D, BLOCK_V, True, True, WANTED,
        )  # fmt: skip
    else:
        if R.has_full_tiles:
            if R.masked_first_by_key:
                state = add_queries(
                    state, low, full_low, key, value, p_query, p_d_out, p_neg_lse, p_neg_delta, p_masks, stream_0, stream_1,
                    o_key, queries, keys, R, BLOCK_Q, BLOCK_D, BLOCK_V, True, False, WANTED,
                )  # fmt: skip
            state = add_queries(
                state, full_low, full_high, key, value, p_query, p_d_out, p_neg_lse, p_neg_delta, p_masks, stream_0, stream_1,
                o_key, queries, keys, R, BLOCK_Q, BLOCK_D, BLOCK_V, False, False, WANTED,
            )  # fmt: skip
        else:
            full_high = low
        state = add_queries(
            state, full_high, high, key, value, p_query, p_d_out, p_neg_lse, p_neg_delta, p_masks, stream_0, stream_1, o_key,
            queries, keys, R, BLOCK_Q, BLOCK_D, BLOCK_V, True, False, WANTED,
        )  # fmt: skip
    return state


@triton.jit
def add_keys(
    b_d_query, start, stop, query, d_out, b_neg_lse, b_neg_delta, p_key, p_value, p_masks, stream_0, stream_1, o_query, queries,
    keys, R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    MASKED: tl.constexpr, NAN_SAFE: tl.constexpr,
):  # fmt: skip
    """Accumulate d_query over the keys in [start, stop)."""
    o_block = tl.arange(0, BLOCK_K)
    KEY_STRIDE: tl.constexpr = R.heads // R.group * R.row
    VALUE_STRIDE: tl.constexpr = R.heads // R.group * R.value_row
    for i_place in tl.range(start, stop, BLOCK_K):
        i_key = token_at(p_masks, i_place, R)
        o_start = tl.full((), 0, tl.int64) + i_key
        key = load_operand(p_key + o_start * KEY_STRIDE, o_block, keys - i_key, KEY_STRIDE, R.size, BLOCK_D, MASKED, R)
        b_qk = scores_minus_lse(query, transpose_operand(key, R), b_neg_lse[:, None], R, NAN_SAFE)  # [BLOCK_Q, BLOCK_K]
        value = load_operand(
            p_value + o_start * VALUE_STRIDE, o_block, keys - i_key, VALUE_STRIDE, R.value_size, BLOCK_V, MASKED, R
        )
        b_d_weights = d_weights_minus_delta(d_out, transpose_operand(value, R), b_neg_delta[:, None], R, NAN_SAFE)
        b_weights, b_slope, m_visible, b_keep = weights_of(
            b_qk, b_neg_lse[:, None], p_masks, stream_0, stream_1, o_query, (i_key + o_block)[None, :], queries, keys,
            R, MASKED, NAN_SAFE, True,
        )  # fmt: skip
        b_d_logits = d_logits_of(b_weights, b_slope, m_visible, b_keep, b_d_weights, b_neg_delta[:, None], R, NAN_SAFE, True)
        if NAN_SAFE:
            key = finite_operand(key, R)
        b_d_query = dot_accumulate(b_d_query, split_operand(b_d_logits, key[0].dtype, R), key, R, NAN_SAFE)
    return b_d_query


@triton.jit
def query_gradient_kernel(
    p_query,
    p_key,
    p_value,
    p_bias,
    p_mask,
    p_query_segments,
    p_key_segments,
    p_query_positions,
    p_key_positions,
    p_streams,
    p_values,
    p_integers,
    p_batch,
    p_head,
    p_ranges,
    p_d_out,
    p_neg_lse,
    p_neg_delta,
    queries,
    keys,
    blocks,
    batch_heads,
    heads_in_l2,
    p_d_query,
    R: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    i_block, i_batch_head = tile_coordinate(blocks, batch_heads, heads_in_l2, R.causal)
    i_batch = i_batch_head // R.heads
    i_head = i_batch_head - i_batch * R.heads
    i_first = i_block * BLOCK_Q
    o_block = tl.arange(0, BLOCK_Q)
    o_query = (i_first + o_block)[:, None]
    o_row = (i_batch.to(tl.int64) * queries + i_first) * R.heads + i_head
    o_key_row = i_batch.to(tl.int64) * keys * (R.heads // R.group) + i_head // R.group
    p_key += o_key_row * R.row
    p_value += o_key_row * R.value_row
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

    query = load_operand(p_query + o_row * R.row, o_block, queries - i_first, R.heads * R.row, R.size, BLOCK_D, True, R)
    d_out = load_operand(
        p_d_out + o_row * R.value_row, o_block, queries - i_first, R.heads * R.value_row, R.value_size, BLOCK_V, True, R
    )
    b_neg_lse = tl.load(statistics_pointer(p_neg_lse, i_batch_head, queries) + i_first + o_block)
    b_neg_delta = tl.load(statistics_pointer(p_neg_delta, i_batch_head, queries) + i_first + o_block)

    b_d_query = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    if R.has_full_tiles:
        if R.masked_first:
            b_d_query = add_keys(
                b_d_query, low, full_low, query, d_out, b_neg_lse, b_neg_delta, p_key, p_value, p_masks, stream_0, stream_1,
                o_query, queries, keys, R, BLOCK_K, BLOCK_D, BLOCK_V, True, False,
            )  # fmt: skip
        b_d_query = add_keys(
            b_d_query, full_low, full_high, query, d_out, b_neg_lse, b_neg_delta, p_key, p_value, p_masks, stream_0, stream_1,
            o_query, queries, keys, R, BLOCK_K, BLOCK_D, BLOCK_V, False, False,
        )  # fmt: skip
    else:
        full_high = low
    b_d_query = add_keys(
        b_d_query, full_high, high, query, d_out, b_neg_lse, b_neg_delta, p_key, p_value, p_masks, stream_0, stream_1,
        o_query, queries, keys, R, BLOCK_K, BLOCK_D, BLOCK_V, True, False,
    )  # fmt: skip
    if R.nan_safe:
        if any_nan(b_d_query):
            b_d_query = add_keys(
                tl.zeros([BLOCK_Q, BLOCK_D], tl.float32), low, high, query, d_out, b_neg_lse, b_neg_delta, p_key, p_value,
                p_masks, stream_0, stream_1, o_query, queries, keys, R, BLOCK_K, BLOCK_D, BLOCK_V, True, True,
            )  # fmt: skip
    b_d_query *= R.scale
    store_rows(p_d_query + o_row * R.size, b_d_query, o_block, queries - i_first, R.heads * R.size, R.size, BLOCK_D)


@triton.jit
def tile_gradient_kernel(
    p_query,
    p_key,
    p_value,
    p_bias,
    p_mask,
    p_query_segments,
    p_key_segments,
    p_query_positions,
    p_key_positions,
    p_streams,
    p_values,
    p_integers,
    p_batch,
    p_head,
    p_d_out,
    p_neg_lse,
    p_neg_delta,
    queries,
    keys,
    batch,
    own_query_blocks,
    own_key_blocks,
    p_sums,
    R: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    AXES: tl.constexpr,
    DERIVATIVE: tl.constexpr,
):
    """d_logits times a derivative of theirs, summed in a fixed order over all axes but AXES (1, 2, 4, 8 for b, h, t, s): the
    gradient of a bias, or of what a score function reads, by DERIVATIVE, see `program_of`. A program owns one tile of the sums."""
    i_rest = tl.program_id(0)
    i_own_key = i_rest % own_key_blocks
    i_rest = i_rest // own_key_blocks
    i_own_query = i_rest % own_query_blocks
    i_rest = i_rest // own_query_blocks
    i_own_head = i_rest * 0
    i_own_batch = i_rest
    heads, members = 1, 1
    if AXES & 2:
        i_own_head = i_rest % R.heads
        i_own_batch = i_rest // R.heads
    else:
        heads = R.heads
    if not AXES & 1:
        members = batch
    query_blocks, key_blocks = 1, 1
    if not AXES & 4:
        query_blocks = tl.cdiv(queries, BLOCK_Q)
    if not AXES & 8:
        key_blocks = tl.cdiv(keys, BLOCK_K)

    o_rows, o_columns = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    b_sums = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    for i_step in range(members * heads * query_blocks * key_blocks):
        i_key_block = i_own_key + i_step % key_blocks
        i_left = i_step // key_blocks
        i_query_block = i_own_query + i_left % query_blocks
        i_left = i_left // query_blocks
        i_head = i_own_head + i_left % heads
        i_batch = i_own_batch + i_left // heads
        i_query, i_key = i_query_block * BLOCK_Q, i_key_block * BLOCK_K
        last = tl.minimum(i_query + BLOCK_Q, queries) - 1
        low, high = 0, keys
        if R.ranges == 0:
            low, _, _, high = key_range(i_query + R.offset, last + R.offset, keys, BLOCK_K, R)
        if (i_key < high) & (i_key + BLOCK_K > low):
            o_row = (i_batch.to(tl.int64) * queries + i_query) * R.heads + i_head
            o_key_row = (i_batch.to(tl.int64) * keys + i_key) * (R.heads // R.group) + i_head // R.group
            KEY_HEADS: tl.constexpr = R.heads // R.group
            query = load_operand(p_query + o_row * R.row, o_rows, queries - i_query, R.heads * R.row, R.size, BLOCK_D, True, R)
            key = load_operand(p_key + o_key_row * R.row, o_columns, keys - i_key, KEY_HEADS * R.row, R.size, BLOCK_D, True, R)
            d_out = load_operand(
                p_d_out + o_row * R.value_row, o_rows, queries - i_query, R.heads * R.value_row, R.value_size, BLOCK_V, True, R
            )
            value = load_operand(
                p_value + o_key_row * R.value_row, o_columns, keys - i_key, KEY_HEADS * R.value_row, R.value_size, BLOCK_V,
                True, R,
            )  # fmt: skip
            i_batch_head = i_batch * R.heads + i_head
            b_neg_lse = tl.load(statistics_pointer(p_neg_lse, i_batch_head, queries) + i_query + o_rows)
            b_neg_delta = tl.load(statistics_pointer(p_neg_delta, i_batch_head, queries) + i_query + o_rows)
            b_qk = scores_minus_lse(query, transpose_operand(key, R), b_neg_lse[:, None], R, True)
            b_d_weights = d_weights_minus_delta(d_out, transpose_operand(value, R), b_neg_delta[:, None], R, True)
            p_masks = mask_pointers(
                p_bias, p_mask, p_query_segments, p_key_segments, p_query_positions, p_key_positions, p_mask,
                (p_values, p_integers, p_batch, p_head), i_batch, i_head, queries, keys, R,
            )  # fmt: skip
            stream_0, stream_1 = tl.full((), 0, tl.uint32), tl.full((), 0, tl.uint32)
            if R.dropout:
                stream_0, stream_1 = tl.load(p_streams + i_batch_head * 2), tl.load(p_streams + i_batch_head * 2 + 1)
            b_weights, b_slope, m_visible, b_keep = weights_of(
                b_qk, b_neg_lse[:, None], p_masks, stream_0, stream_1, (i_query + o_rows)[:, None], (i_key + o_columns)[None, :],
                queries, keys, R, True, True, True, DERIVATIVE,
            )  # fmt: skip
            b_d_logits = d_logits_of(b_weights, b_slope, m_visible, b_keep, b_d_weights, b_neg_delta[:, None], R, True, True)
            b_sums += b_d_logits

    o_own_query, o_own_key = i_own_query * BLOCK_Q + o_rows, i_own_key * BLOCK_K + o_columns
    if AXES & 4:
        rows = queries
    else:
        b_sums = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32) + tl.sum(b_sums, axis=0)[None, :]
        rows = 1
    if AXES & 8:
        columns = score_row_stride(keys)
    else:
        b_sums = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32) + tl.sum(b_sums, axis=1)[:, None]
        columns = 1
    o_own = (i_rest.to(tl.int64) * rows + o_own_query[:, None]) * columns + o_own_key[None, :]
    m_own = (o_own_query < rows)[:, None] & (o_own_key < columns)[None, :]
    tl.store(p_sums + o_own, b_sums.to(p_sums.dtype.element_ty), mask=m_own)
