"""Device functions of the selective scan: tiles of states and numbers of channels. `P` is a `params.Params`.

A program holds the states `[block_i, block_n]` of its channels, each channel in one warp. Tokens past the end have dt = 0 and
x = 0, which leaves a state as it is. Decays are powers of two.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

from ejkernel_triton._tokens import joined
from ejkernel_triton.selective_scan import edges

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
RESET, FIRST = tl.constexpr(edges.RESET), tl.constexpr(edges.FIRST)
LAST, OUTSIDE = tl.constexpr(edges.LAST), tl.constexpr(edges.OUTSIDE)
BITS = tl.constexpr(edges.BITS)
EDGES, REACHED = tl.constexpr(edges.EDGES), tl.constexpr(edges.REACHED)


@triton.jit
def state_of(p, i_index, i_block, P: tl.constexpr):
    """Pointers to the states of a block of channels, in `[index, channels, width]`, and which of them exist."""
    o_i, o_n = i_block * P.block_i + tl.arange(0, P.block_i), tl.arange(0, P.block_n)
    p_state = p + i_index.to(tl.int64) * (P.channels * P.width) + o_i[:, None] * P.width + o_n[None, :]
    return p_state, (o_i < P.channels)[:, None] & (o_n < P.width)[None, :]


@triton.jit
def load_state(p, i_index, i_block, P: tl.constexpr):
    """In float32."""
    p_state, m_state = state_of(p, i_index, i_block, P)
    if P.channels % P.block_i == 0 and P.width == P.block_n:
        b_state = tl.load(p_state)
    else:
        b_state = tl.load(p_state, mask=m_state, other=0.0)
    return b_state.to(tl.float32)


@triton.jit
def store_state(p, b_state, i_index, i_block, P: tl.constexpr):
    p_state, m_state = state_of(p, i_index, i_block, P)
    b_state = b_state.to(p.dtype.element_ty)
    if P.channels % P.block_i == 0 and P.width == P.block_n:
        tl.store(p_state, b_state)
    else:
        tl.store(p_state, b_state, mask=m_state)


@triton.jit
def held_of(p_d_x, p_d_dt, p_rest, i_token, tokens, i_block, P: tl.constexpr):
    """Pointers to where the state before a chunk is held until the chunk's gradients are written, and which numbers exist.

    It lies in arrays of which each has a number for every token and channel: those of the gradients of x and dt, which are empty
    until then, and `rest`. An array holds chunk_size numbers of every channel's state. Squares of channels and numbers are
    transposed, so that the numbers that a thread has of a channel lie together. tokens: of all members.
    """
    CHUNK: tl.constexpr = P.chunk_size
    SQUARE: tl.constexpr = P.square
    o_i, o_n = tl.arange(0, P.block_i), tl.arange(0, P.block_n)
    o_row = (o_n // SQUARE % (CHUNK // SQUARE) * SQUARE)[None, :] + (o_i % SQUARE)[:, None]
    o_column = (o_n % SQUARE)[None, :] + (i_block * P.block_i + o_i // SQUARE * SQUARE)[:, None]
    i_array = (o_n // CHUNK)[None, :]
    p_held = p_rest + i_token * P.channels + o_row * P.channels + o_column
    if P.rest > 0:
        p_held += (i_array - P.x_holds - (P.dt_holds > 0)) * (tokens * P.channels)
    if P.dt_holds > 0:
        p_dt = p_d_dt.to(p_rest.dtype, bitcast=True) + i_token * (P.dt_holds * P.channels)
        p_held = tl.where(i_array == P.x_holds, p_dt + o_row * (P.dt_holds * P.channels) + o_column, p_held)
    if P.x_holds:
        p_held = tl.where(i_array == 0, p_d_x + i_token * P.channels + o_row * P.channels + o_column, p_held)
    return p_held, (i_block * P.block_i + o_i < P.channels)[:, None] & (o_n < P.width)[None, :]


@triton.jit
def hold_state(p_d_x, p_d_dt, p_rest, p_d_A, b_state, i_token, rows, tokens, i_index, i_block, P: tl.constexpr):
    """Hold the state before the chunk that begins with i_token.

    A chunk with fewer tokens than others, which is the last of a segment, leaves it where the segment's gradient of A will be.
    """
    if P.whole or rows >= P.chunk_size:
        p_held, m_held = held_of(p_d_x, p_d_dt, p_rest, i_token, tokens, i_block, P)
        b_held = b_state.to(p_rest.dtype.element_ty)
        if P.channels % P.block_i == 0 and P.width == P.block_n:
            tl.store(p_held, b_held)
        else:
            tl.store(p_held, b_held, mask=m_held)
    else:
        store_state(p_d_A, b_state, i_index, i_block, P)


@triton.jit
def held_state(p_d_x, p_d_dt, p_rest, p_d_A, i_token, rows, tokens, i_index, i_block, P: tl.constexpr):
    """What `hold_state` held, in float32."""
    if P.whole or rows >= P.chunk_size:
        p_held, m_held = held_of(p_d_x, p_d_dt, p_rest, i_token, tokens, i_block, P)
        if P.channels % P.block_i == 0 and P.width == P.block_n:
            b_state = tl.load(p_held).to(tl.float32)
        else:
            b_state = tl.load(p_held, mask=m_held, other=0.0).to(tl.float32)
    else:
        b_state = load_state(p_d_A, i_index, i_block, P)
    return b_state


@triton.jit
def sum_of_warps(b_tile, P: tl.constexpr):
    """What each warp sums over its channels, `[num_warps * block_n]`."""
    ROWS: tl.constexpr = P.warp_rows
    WARPS: tl.constexpr = P.num_warps
    BLOCK_N: tl.constexpr = P.block_n
    b_tile = tl.reshape(b_tile, [P.block_i // (WARPS * ROWS), WARPS, ROWS, BLOCK_N])
    return tl.reshape(tl.sum(tl.sum(b_tile, axis=0), axis=1), [WARPS * BLOCK_N])


@triton.jit
def sum_of_channels(b_sums, P: tl.constexpr):
    """`[block_n, chunk_size]`, from every token's `sum_of_warps`."""
    WARPS: tl.constexpr = P.num_warps
    BLOCK_N: tl.constexpr = P.block_n
    CHUNK: tl.constexpr = P.chunk_size
    return tl.sum(tl.reshape(joined(b_sums, WARPS * BLOCK_N, P), [WARPS, BLOCK_N, CHUNK]), axis=0)


@triton.jit
def exponents_of(p_A, i_batch, i_block, P: tl.constexpr):
    """A in powers of two. -inf, which forgets, is finite here: tokens outside of the sequence have dt = 0, and 0 * inf is NaN."""
    b_A = load_state(p_A, i_batch if P.rates_per_member else i_batch * 0, i_block, P) * LOG2_E
    return tl.maximum(b_A, -3.0e38, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def channels_of(p, i_index, i_block, P: tl.constexpr):
    """A number of every channel of the block, from `[index, channels]`."""
    o_i = i_block * P.block_i + tl.arange(0, P.block_i)
    return tl.load(p + i_index.to(tl.int64) * P.channels + o_i, mask=o_i < P.channels, other=0.0).to(tl.float32)


@triton.jit
def store_channels(p, b_row, i_index, i_block, P: tl.constexpr):
    o_i = i_block * P.block_i + tl.arange(0, P.block_i)
    tl.store(p + i_index.to(tl.int64) * P.channels + o_i, b_row, mask=o_i < P.channels)


@triton.jit
def marks_of(p_marks, i_chunk, P: tl.constexpr):
    """Of a chunk: whether it has edges, whether the state before its segment reaches it, and where the marks of its tokens are."""
    p_chunk = p_marks + i_chunk.to(tl.int64) * (P.chunk_size + 1)
    i_mark = tl.load(p_chunk)
    return (i_mark & EDGES) != 0, (i_mark & REACHED) != 0, p_chunk + 1


@triton.jit
def inside(b_row, i_mark):
    """0 for a token outside of every sequence."""
    return tl.where((i_mark & OUTSIDE) != 0, 0.0, b_row)


@triton.jit
def state_at(b_state, i_mark, p_initial, i_block, INITIAL: tl.constexpr, P: tl.constexpr):
    """The state before a token: another one where it begins a sequence."""
    b_state = tl.where((i_mark & RESET) != 0, 0.0, b_state)
    if P.packed and INITIAL and (i_mark & FIRST) != 0:
        b_state = load_state(p_initial, i_mark >> BITS, i_block, P)
    return b_state
