"""Device functions of the selective scan: tiles of states and numbers of channels. `P` is a `params.Params`.

A program is one warp and holds the states `[block_i, block_n]` of its channels. Tokens past the end have dt = 0 and x = 0, which
leaves a state as it is. Decays are powers of two.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

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
def kept_state_of(p, i_index, i_block, P: tl.constexpr):
    """Pointers to a state that only these kernels see, block after block, in the order of threads.

    Four numbers of a channel lie together: threads that held more of one would have more sums over channels to exchange.
    """
    BLOCKS: tl.constexpr = (P.channels + P.block_i - 1) // P.block_i
    o_i, o_n = tl.arange(0, P.block_i), tl.arange(0, P.block_n)
    o_state = (o_n // 4 * P.block_i)[None, :] * 4 + o_i[:, None] * 4 + (o_n % 4)[None, :]
    return p + (i_index.to(tl.int64) * BLOCKS + i_block) * P.kept + o_state


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
