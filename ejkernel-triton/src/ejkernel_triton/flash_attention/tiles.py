"""Device functions that every attention kernel shares: which tiles, which entries of a tile, and their logits.

A tile's entries are addressed by two index arrays that broadcast together: `o_query` `[BQ, 1]` and `o_key` `[1, BK]`, or
`[1, BQ]` and `[BK, 1]` where scores are computed as their transpose. `R` is a `mask_params.MaskParams`.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
# ruff: noqa: SIM108 - static and dynamic conditions stay apart
import triton
import triton.language as tl


@triton.jit
def tile_coordinate(blocks, heads, heads_in_l2, LAST_FIRST: tl.constexpr):
    """This program's block and its batch-and-head: sections of heads whose keys fit the L2 cache, blocks outermost in each."""
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
    """Rows as an operand of `dot`: all parts of a row lie one after the other."""
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
    """`left . right` in float32; CAREFUL: an infinity times the 0 in a low part does not count.

    Of nine products of parts the three smallest are left out: together they are about as large as float32's own rounding of one
    term. Tensor cores cut their sums instead of rounding them, so the small ones come first, and long sums over tiles are made
    outside of them.
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
    """Only a first part is ever not finite."""
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
    """Floor division; the machine's rounds to zero."""
    return tl.where(x >= 0, x // CHUNK, -1 - (-1 - x) // CHUNK)


@triton.jit
def key_range(first, last, keys, BLOCK: tl.constexpr, R: tl.constexpr):
    """Keys that queries at positions first ... last may see, as multiples of BLOCK: in [low, high), and all of them see all of
    [full_low, full_high)."""
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
    """The same for keys first ... last: which queries may see them."""
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
    """Ends at multiples of BLOCK, so that low <= full_low <= full_high <= high, or an empty middle at low."""
    high = tl.maximum(high, 0)
    low = tl.minimum(tl.maximum(low, 0), high) // BLOCK * BLOCK
    full_low = (tl.maximum(full_low, low) + BLOCK - 1) // BLOCK * BLOCK
    full_high = tl.maximum(full_high, 0) // BLOCK * BLOCK
    none = full_high <= full_low
    full_low = tl.where(none, low, full_low)
    full_high = tl.where(none, low, full_high)
    return low, full_low, full_high, high


@triton.jit
def load_range(p_ranges, i_batch, blocks, i_block, R: tl.constexpr):
    """The four ends that were computed from arrays before the launch."""
    i_row = i_block
    if R.ranges == 2:
        i_row = i_batch * blocks + i_block
    p_row = p_ranges + i_row.to(tl.int64) * 4
    return tl.load(p_row), tl.load(p_row + 1), tl.load(p_row + 2), tl.load(p_row + 3)


@triton.jit
def batch_pointer(p, i_batch, size, STORAGE: tl.constexpr):
    """A batch's row of a `[1 or b, size]` array."""
    if STORAGE == 2:
        p += i_batch.to(tl.int64) * size
    return p


@triton.jit
def score_row_stride(keys):
    """Elements of a row of a `[b?, h?, t?, s]` array, padded to a multiple of 16.

    As the compiler knows that, it loads vectors, and in a layout that is not its default: from there the default would spread to
    the weights, which are then computed twice, in the layout of the products too.
    """
    return tl.cdiv(keys, 16) * 16


@triton.jit
def score_pointer(p, i_batch, i_head, queries, keys, R: tl.constexpr, AXES: tl.constexpr):
    """Where one batch's and head's part of a `[b?, h?, t?, s?]` array begins."""
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
    """One tile of such an array, with its broadcast axes of size 1 (both: of one number, like a bias of queries); 0 outside."""
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
    """Where the rows of one head begin in a statistic `[b, h, t]`, whose t is padded to a multiple of 128."""
    return p + i_batch_head.to(tl.int64) * (tl.cdiv(queries, 128) * 128)


@triton.jit
def mask_pointers(
    p_bias, p_mask, p_query_segments, p_key_segments, p_query_positions, p_key_positions, i_batch, i_head, queries, keys,
    R: tl.constexpr,
):  # fmt: skip
    """Pointers to one batch's and head's part of what `visible_in` and `bias_in` read."""
    return (
        score_pointer(p_bias, i_batch, i_head, queries, keys, R, R.bias),
        score_pointer(p_mask, i_batch, i_head, queries, keys, R, R.mask),
        batch_pointer(p_query_segments, i_batch, queries, R.query_segments),
        batch_pointer(p_key_segments, i_batch, keys, R.key_segments),
        batch_pointer(p_query_positions, i_batch, queries, R.query_positions),
        batch_pointer(p_key_positions, i_batch, keys, R.key_positions),
    )


@triton.jit
def visible_in(p_masks, o_query, o_key, queries, keys, R: tl.constexpr):
    """Which entries of a tile are visible. Queries past the end need no rule: what they hold is 0."""
    if R.query_positions > 0:
        b_query = tl.load(p_masks[4] + o_query, mask=o_query < queries, other=0)
    else:
        b_query = o_query + R.offset
    if R.key_positions > 0:
        b_key = tl.load(p_masks[5] + o_key, mask=o_key < keys, other=0)
    else:
        b_key = o_key
    if R.causal_by_index:  # keys past the end are put after every query; one comparison of unsigned numbers holds two
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
    return m_visible


@triton.jit
def bias_in(p_masks, m_visible, o_query, o_key, queries, keys, R: tl.constexpr, NAN_SAFE: tl.constexpr):
    """The bias of a tile, and which entries are visible of those that `m_visible` says.

    One of -inf hides by itself, but for a logit that is capped or not a number.
    """
    b_bias = load_scores(p_masks[0], o_query, o_key, queries, keys, R.bias).to(tl.float32)
    if NAN_SAFE or R.capped:
        m_visible = m_visible & (b_bias != float("-inf"))
        b_bias = tl.where(m_visible, b_bias, 0.0)
    return b_bias, m_visible


@triton.jit
def logits_of(b_qk, b_bias, R: tl.constexpr):
    """Logits in the units of `R`, and the tangent that a soft cap made them from."""
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
    """Which entries dropout leaves: `ejkernel.operations.flash_attention.dropout`."""
    b_row = hash_bits(stream_0 ^ (o_query.to(tl.uint32) * 0x9E3779B9))
    return hash_bits(b_row ^ stream_1 ^ (o_key.to(tl.uint32) * 0x85EBCA6B)) >= R.threshold
