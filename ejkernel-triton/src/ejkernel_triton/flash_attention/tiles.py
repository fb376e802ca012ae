"""Device functions that the attention kernels share: tile coordinates and ranges, masks and logits.

A tile's entries are addressed by two index arrays that broadcast together: `o_query` `[BQ, 1]` and `o_key` `[1, BK]`, or `[1,
BQ]` and `[BK, 1]` if scores are transposed. `R` is a `MaskParams`.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
# ruff: noqa: SIM108 - static and dynamic conditions stay apart
import triton
import triton.language as tl

from ejkernel_triton.flash_attention.score_tiles import evaluated


@triton.jit
def tile_coordinate(blocks, heads, heads_in_l2, LAST_FIRST: tl.constexpr):
    """This program's block and batch-head index. Heads are swizzled for L2 reuse: `heads_in_l2` heads at a time, blocks
    outermost."""
    i_program = tl.program_id(0)
    i_swizzle = i_program // (heads_in_l2 * blocks)
    i_within = i_program - i_swizzle * (heads_in_l2 * blocks)
    members = tl.minimum(heads_in_l2, heads - i_swizzle * heads_in_l2)
    i_block = i_within // members
    i_head = i_swizzle * heads_in_l2 + i_within - i_block * members
    if LAST_FIRST:
        i_block = blocks - 1 - i_block
    return i_block, i_head


@triton.jit
def load_rows(p, o_row, rows, STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    """`[len(o_row), BLOCK]`, zeros beyond SIZE and, with TAIL, beyond `rows`."""
    o_column = tl.arange(0, BLOCK)
    p_tile = p + o_row[:, None] * STRIDE + o_column[None, :]
    if TAIL:
        if SIZE == BLOCK:
            b_tile = tl.load(p_tile, mask=(o_row < rows)[:, None], other=0.0)
        else:
            b_tile = tl.load(p_tile, mask=(o_row < rows)[:, None] & (o_column < SIZE)[None, :], other=0.0)
    else:
        if SIZE == BLOCK:
            b_tile = tl.load(p_tile)
        else:
            b_tile = tl.load(p_tile, mask=(o_column < SIZE)[None, :], other=0.0)
    return b_tile


@triton.jit
def load_operand(
    p, o_row, rows, STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Rows as an operand of `dot`; the terms of a row are contiguous."""
    b_hi = load_rows(p, o_row, rows, STRIDE, SIZE, BLOCK, TAIL)
    if R.bf16_terms == 1:
        bf16_terms = (b_hi,)
    else:
        b_mid = load_rows(p + SIZE, o_row, rows, STRIDE, SIZE, BLOCK, TAIL)
        bf16_terms = (b_hi, b_mid, load_rows(p + 2 * SIZE, o_row, rows, STRIDE, SIZE, BLOCK, TAIL))
    return bf16_terms


@triton.jit
def split_operand(b_tile, dtype: tl.constexpr, R: tl.constexpr):
    """A float32 tile as an operand of `dot`."""
    if R.bf16_terms == 1:
        bf16_terms = (b_tile.to(dtype),)
    else:
        b_hi = b_tile.to(dtype)
        b_residual = b_tile - b_hi.to(tl.float32)
        b_mid = b_residual.to(dtype)
        bf16_terms = (b_hi, b_mid, (b_residual - b_mid.to(tl.float32)).to(dtype))
    return bf16_terms


@triton.jit
def transpose_operand(bf16_terms, R: tl.constexpr):
    if R.bf16_terms == 1:
        turned = (tl.trans(bf16_terms[0]),)
    else:
        turned = (tl.trans(bf16_terms[0]), tl.trans(bf16_terms[1]), tl.trans(bf16_terms[2]))
    return turned


@triton.jit
def dot(left, right, R: tl.constexpr, NAN_SAFE: tl.constexpr):
    """`left . right` in float32. NAN_SAFE: drop NaN of an infinity times a low term of 0.

    bf16x6 skips the three smallest of the nine products: their sum is about float32's rounding error of one term. Tensor cores
    truncate sums, so small products come first, and sums over tiles are accumulated outside of the MMA.
    """
    if R.bf16_terms == 1:
        b_product = tl.dot(left[0], right[0], input_precision=R.precision)
    else:
        b_small = tl.dot(left[2], right[0])
        b_small = tl.dot(left[0], right[2], b_small)
        b_small = tl.dot(left[1], right[1], b_small)
        b_small = tl.dot(left[1], right[0], b_small)
        b_small = tl.dot(left[0], right[1], b_small)
        if NAN_SAFE:
            b_small = tl.where(b_small - b_small == 0, b_small, 0.0)
        b_product = tl.dot(left[0], right[0], b_small)
    return b_product


@triton.jit
def dot_accumulate(b_sum, left, right, R: tl.constexpr, NAN_SAFE: tl.constexpr):
    if R.bf16_terms == 1:
        b_sum = tl.dot(left[0], right[0], b_sum, input_precision=R.precision)
    else:
        b_sum += dot(left, right, R, NAN_SAFE)
    return b_sum


@triton.jit
def store_rows(p, b_tile, o_row, rows, STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    o_column = tl.arange(0, BLOCK)
    p_tile = p + o_row[:, None] * STRIDE + o_column[None, :]
    tl.store(p_tile, b_tile.to(p.dtype.element_ty), mask=(o_row < rows)[:, None] & (o_column < SIZE)[None, :])


@triton.jit
def finite(b_tile):
    """0 for NaN and infinities."""
    b_wide = b_tile.to(tl.float32)
    return tl.where(b_wide - b_wide == 0, b_wide, 0.0).to(b_tile.dtype)


@triton.jit
def finite_operand(bf16_terms, R: tl.constexpr):
    """Only the first term can be non-finite."""
    if R.bf16_terms == 1:
        clean = (finite(bf16_terms[0]),)
    else:
        clean = (finite(bf16_terms[0]), bf16_terms[1], bf16_terms[2])
    return clean


@triton.jit
def propagate_nan(b_tile):
    """Per row: 0 if all of it is finite, else NaN."""
    return tl.sum(b_tile.to(tl.float32) * 0.0, axis=1)


@triton.jit
def any_nan(b_tile):
    return tl.max((b_tile != b_tile).to(tl.int32), axis=None) > 0


@triton.jit
def chunk_of(x, CHUNK: tl.constexpr):
    """Floor division; the hardware's rounds toward zero."""
    return tl.where(x >= 0, x // CHUNK, -1 - (-1 - x) // CHUNK)


@triton.jit
def key_range(first, last, keys, BLOCK: tl.constexpr, R: tl.constexpr):
    """Key range of queries at positions first ... last, in multiples of BLOCK: some may see [low, high), all see [full_low,
    full_high)."""
    low = first * 0
    high = low + keys
    full_low, full_high = low, high
    if R.causal:
        high = tl.minimum(high, tl.maximum(last + 1, R.prefix))
        full_high = tl.minimum(full_high, tl.maximum(first + 1, R.prefix))
    if R.left >= 0:
        low = tl.maximum(low, first - R.left)
        full_low = tl.maximum(full_low, last - R.left)
    if R.right >= 0:
        high = tl.minimum(high, last + R.right + 1)
        full_high = tl.minimum(full_high, first + R.right + 1)
    if R.chunk > 0:
        first_chunk, last_chunk = chunk_of(first, R.chunk), chunk_of(last, R.chunk)
        low = tl.maximum(low, first_chunk * R.chunk)
        high = tl.minimum(high, (last_chunk + 1) * R.chunk)
        full_low = tl.maximum(full_low, last_chunk * R.chunk)
        full_high = tl.minimum(full_high, (first_chunk + 1) * R.chunk)
    return round_to_blocks(low, full_low, full_high, high, BLOCK)


@triton.jit
def query_range(first, last, queries, BLOCK: tl.constexpr, R: tl.constexpr):
    """Query range of keys first ... last, likewise."""
    low = first * 0 + R.offset
    high = low + queries
    full_low, full_high = low, high
    if R.causal:
        low = tl.where(first < R.prefix, low, tl.maximum(low, first))
        full_low = tl.where(last < R.prefix, full_low, tl.maximum(full_low, last))
    if R.left >= 0:
        high = tl.minimum(high, last + R.left + 1)
        full_high = tl.minimum(full_high, first + R.left + 1)
    if R.right >= 0:
        low = tl.maximum(low, first - R.right)
        full_low = tl.maximum(full_low, last - R.right)
    if R.chunk > 0:
        first_chunk, last_chunk = first // R.chunk, last // R.chunk
        low = tl.maximum(low, first_chunk * R.chunk)
        high = tl.minimum(high, (last_chunk + 1) * R.chunk)
        full_low = tl.maximum(full_low, last_chunk * R.chunk)
        full_high = tl.minimum(full_high, (first_chunk + 1) * R.chunk)
    return round_to_blocks(low - R.offset, full_low - R.offset, full_high - R.offset, high - R.offset, BLOCK)


@triton.jit
def round_to_blocks(low, full_low, full_high, high, BLOCK: tl.constexpr):
    """Round to multiples of BLOCK, so that low <= full_low <= full_high <= high; an empty full range lies at low."""
    high = tl.maximum(high, 0)
    low = tl.minimum(tl.maximum(low, 0), high) // BLOCK * BLOCK
    full_low = (tl.maximum(full_low, low) + BLOCK - 1) // BLOCK * BLOCK
    full_high = tl.maximum(full_high, 0) // BLOCK * BLOCK
    none = full_high <= full_low
    full_low = tl.where(none, low, full_low)
    full_high = tl.where(none, low, full_high)
    return low, full_low, full_high, high


@triton.jit
def split_of_range(low, full_low, full_high, high, i_split, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """The i-th of SPLITS parts of a tile range, in multiples of BLOCK; the last ones may be empty."""
    size = tl.cdiv(tl.cdiv(high - low, SPLITS), BLOCK) * BLOCK
    low = tl.minimum(low + i_split * size, high)
    high = tl.minimum(low + size, high)
    return low, tl.minimum(tl.maximum(full_low, low), high), tl.minimum(tl.maximum(full_high, low), high), high


@triton.jit
def load_range(p_ranges, i_batch, i_head, blocks, i_block, length, R: tl.constexpr):
    """Load a tile range that was computed from arrays before the launch, and the pointer to the list of blocks behind it.

    With `R.list_block` the range counts tokens of the listed blocks, one block behind the other.
    """
    i_row = i_block
    if R.ranges == 2:
        i_row += i_batch * R.list_heads * blocks
    if R.list_heads > 1:
        i_row += i_head * blocks
    stride = 4
    if R.list_block > 0:
        stride += tl.cdiv(length, R.list_block)
    p_row = p_ranges + i_row.to(tl.int64) * stride
    high = tl.load(p_row + 3)
    if R.list_block == 0:
        high = tl.minimum(high, length)
    return tl.load(p_row), tl.load(p_row + 1), tl.load(p_row + 2), high, p_row + 4


@triton.jit
def token_at(p_masks, i_place, R: tl.constexpr):
    """First token of the tile at a place of a tile range."""
    i_token = i_place
    if R.list_block > 0:
        i_token = tl.load(p_masks[6] + i_place // R.list_block) * R.list_block + i_place % R.list_block
    return i_token


@triton.jit
def batch_pointer(p, i_batch, size, STORAGE: tl.constexpr):
    """Pointer to the batch member's row of a `[1 or b, size]` array."""
    if STORAGE == 2:
        p += i_batch.to(tl.int64) * size
    return p


@triton.jit
def score_row_stride(keys):
    """Row stride of a `[b?, h?, t?, s]` array, padded to a multiple of 16.

    The known divisibility makes Triton use vector loads, in their own layout. The default layout would spread to the weights,
    which would then be computed twice, also in the MMA layout.
    """
    return tl.cdiv(keys, 16) * 16


@triton.jit
def score_pointer(p, i_batch, i_head, queries, keys, R: tl.constexpr, AXES: tl.constexpr):
    """Pointer to one batch and head of a `[b?, h?, t?, s?]` array."""
    if AXES > 0:
        size = tl.full((), 1, tl.int64)
        if AXES & 8:
            size *= score_row_stride(keys)
        if AXES & 4:
            size *= queries
        if AXES & 2:
            p += i_head * size
            size *= R.heads
        if AXES & 1:
            p += i_batch * size
    return p


@triton.jit
def load_scores(p, o_query, o_key, queries, keys, AXES: tl.constexpr):
    """One tile of such an array, with its broadcast axes of size 1; 0 out of bounds."""
    row = score_row_stride(keys)
    if AXES & 8:
        if AXES & 4:
            b_tile = tl.load(p + (o_query.to(tl.int64) * row + o_key), mask=(o_query < queries) & (o_key < row), other=0)
        else:
            b_tile = tl.load(p + o_key, mask=o_key < row, other=0)
    else:
        b_tile = tl.load(p + o_query * (AXES // 4 % 2), mask=o_query < queries, other=0)
    return b_tile


@triton.jit
def statistics_pointer(p, i_batch_head, queries):
    """Pointer to one head of a statistic `[b, h, t]`, whose t is padded to a multiple of 128."""
    return p + i_batch_head.to(tl.int64) * (tl.cdiv(queries, 128) * 128)


@triton.jit
def mask_pointers(
    p_bias, p_mask, p_query_segments, p_key_segments, p_query_positions, p_key_positions, p_list, p_functions, i_batch, i_head,
    queries, keys, R: tl.constexpr,
):  # fmt: skip
    """Pointers to one batch and head of the arrays that `visible_in` and `bias_in` read, to the list of `token_at`, and to the
    numbers that functions read, with batch and head as those are told."""
    p_values, p_integers, p_batch, p_head = p_functions
    i_told_batch, i_told_head = i_batch, i_head
    if R.told_batch > 0:
        i_told_batch = tl.load(p_batch + i_batch)
    if R.told_head == 1:
        i_told_head = tl.load(p_head + i_head)
    if R.told_head == 2:
        i_told_head = tl.load(p_head + i_batch * R.heads + i_head)
    return (
        score_pointer(p_bias, i_batch, i_head, queries, keys, R, R.bias),
        score_pointer(p_mask, i_batch, i_head, queries, keys, R, R.mask),
        batch_pointer(p_query_segments, i_batch, queries, R.query_segments),
        batch_pointer(p_key_segments, i_batch, keys, R.key_segments),
        batch_pointer(p_query_positions, i_batch, queries, R.query_positions),
        batch_pointer(p_key_positions, i_batch, keys, R.key_positions),
        p_list,
        p_values + i_batch.to(tl.int64) * R.values,
        p_integers + i_batch.to(tl.int64) * R.integers,
        i_told_batch,
        i_told_head,
    )


@triton.jit
def visible_in(p_masks, o_query, o_key, queries, keys, R: tl.constexpr):
    """Visibility mask of a tile. Queries past the end are not masked: they hold 0."""
    if R.query_positions > 0:
        b_query = tl.load(p_masks[4] + o_query, mask=o_query < queries, other=0)
    else:
        b_query = o_query + R.offset
    if R.key_positions > 0:
        b_key = tl.load(p_masks[5] + o_key, mask=o_key < keys, other=0)
    else:
        b_key = o_key
    if R.causal_by_index:  # keys past the end come after every query; one unsigned comparison checks both bounds
        b_distance = b_query - tl.where(o_key < keys, o_key, 1 << 30)
        if R.left >= 0:
            m_visible = b_distance.to(tl.uint32) <= R.left
        else:
            m_visible = b_distance >= 0
    else:
        m_visible = o_key < keys
        if R.causal:
            if R.prefix > 0:
                m_visible = m_visible & ((b_key <= b_query) | (b_key < R.prefix))
            else:
                m_visible = m_visible & (b_key <= b_query)
        if R.left >= 0:
            m_visible = m_visible & (b_query - b_key <= R.left)
    if R.right >= 0:
        m_visible = m_visible & (b_key - b_query <= R.right)
    if R.chunk > 0:
        m_visible = m_visible & (chunk_of(b_query, R.chunk) == chunk_of(b_key, R.chunk))
    if R.query_segments > 0:
        b_own = tl.load(p_masks[2] + o_query, mask=o_query < queries, other=-1)
        b_other = tl.load(p_masks[3] + o_key, mask=o_key < keys, other=-1)
        m_visible = m_visible & (b_own == b_other) & (b_own >= 0)
    if R.mask >= 0:
        m_visible = m_visible & load_scores(p_masks[1], o_query, o_key, queries, keys, R.mask).to(tl.int1)
    if R.mask_program is not None:
        m_visible = m_visible & evaluated(p_masks, 0.0, o_query, o_key, R, "mask")
    return m_visible


@triton.jit
def bias_in(p_masks, m_visible, o_query, o_key, queries, keys, R: tl.constexpr, NAN_SAFE: tl.constexpr):
    """The bias of a tile, and `m_visible` with the entries masked where the bias is -inf.

    A bias of -inf masks by itself, unless the logit is capped, goes through a score function, or is NaN.
    """
    b_bias = load_scores(p_masks[0], o_query, o_key, queries, keys, R.bias).to(tl.float32)
    if NAN_SAFE or R.capped or R.score is not None:
        m_visible = m_visible & (b_bias != float("-inf"))
        b_bias = tl.where(m_visible, b_bias, 0.0)
    return b_bias, m_visible


@triton.jit
def logits_of(b_qk, b_bias, R: tl.constexpr):
    """Logits in the units of `R`, and the tanh of the soft cap."""
    if R.rounding == "bfloat16":
        b_qk = b_qk.to(tl.bfloat16).to(tl.float32)
    if R.rounding == "float16":
        b_qk = b_qk.to(tl.float16).to(tl.float32)
    b_logits = b_qk
    if R.factor != 1.0:
        b_logits = b_logits * R.factor
    if R.bias >= 0:
        b_logits += b_bias * R.bias_factor
    b_tangent = b_logits
    if R.capped:
        b_tangent = 1.0 - 2.0 / (tl.exp2(b_logits) + 1.0)
        b_logits = b_tangent * R.cap_factor
    return b_logits, b_tangent


@triton.jit
def hash_bits(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def keep_mask(stream_0, stream_1, o_query, o_key, R: tl.constexpr):
    """Dropout keep mask, see `ejkernel.operations.flash_attention.dropout`."""
    b_row = hash_bits(stream_0 ^ (o_query.to(tl.uint32) * 0x9E3779B9))
    return hash_bits(b_row ^ stream_1 ^ (o_key.to(tl.uint32) * 0x85EBCA6B)) >= R.threshold
