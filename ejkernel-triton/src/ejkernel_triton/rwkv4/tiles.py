"""Device functions of RWKV-4: a state is three numbers of every channel. `P` is `params.Params`."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

NOTHING_SEEN = tl.constexpr(-1e30)
"""`ejkernel.operations.rwkv4.interface.NOTHING_SEEN`."""
FORGETS = tl.constexpr(80.0)
"""From this w on, which is `exp(80)` in the exponent, nothing is left; the exponent and its gradient stay finite in float32."""


@triton.jit
def number_of(p, i_row, i_block, P: tl.constexpr):
    """Pointers to a number of every channel of a block, in `[rows, channels]`, and which of them exist."""
    o_i = i_block * P.block_i + tl.arange(0, P.block_i)
    return p + i_row.to(tl.int64) * P.channels + o_i, o_i < P.channels


@triton.jit
def load_number(p, i_row, i_block, P: tl.constexpr):
    """In float32."""
    p_number, m_number = number_of(p, i_row, i_block, P)
    return tl.load(p_number, mask=m_number, other=0.0).to(tl.float32)


@triton.jit
def store_number(p, b_number, i_row, i_block, P: tl.constexpr):
    p_number, m_number = number_of(p, i_row, i_block, P)
    tl.store(p_number, b_number.to(p.dtype.element_ty), mask=m_number)


@triton.jit
def load_state(p, i_index, i_block, P: tl.constexpr):
    """From `[index, 3, channels]`."""
    b_a = load_number(p, i_index * 3, i_block, P)
    b_b = load_number(p, i_index * 3 + 1, i_block, P)
    return b_a, b_b, load_number(p, i_index * 3 + 2, i_block, P)


@triton.jit
def store_state(p, b_a, b_b, b_p, i_index, i_block, P: tl.constexpr):
    store_number(p, b_a, i_index * 3, i_block, P)
    store_number(p, b_b, i_index * 3 + 1, i_block, P)
    store_number(p, b_p, i_index * 3 + 2, i_block, P)


@triton.jit
def nothing_seen(P: tl.constexpr):
    BLOCK: tl.constexpr = P.block_i
    b_zero = tl.zeros([BLOCK], tl.float32)
    return b_zero, b_zero, tl.full([BLOCK], NOTHING_SEEN, tl.float32)


@triton.jit
def log_decay_of(p_w, i_batch, i_block, P: tl.constexpr):
    """Log decay of one token."""
    b_w = load_number(p_w, i_batch if P.own_w else i_batch * 0, i_block, P)
    return -tl.exp(tl.minimum(b_w, FORGETS, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def bonus_of(p_u, i_batch, i_block, P: tl.constexpr):
    return load_number(p_u, i_batch if P.own_u else i_batch * 0, i_block, P)


@triton.jit
def log_at(b_log, u, rows, P: tl.constexpr):
    """The log decay at token u of a chunk: none past the end."""
    if not P.whole:
        b_log = tl.where(u < rows, b_log, 0.0)
    return b_log


@triton.jit
def read(b_a, b_b, b_p, b_logit, b_v):
    """Output, and the weights of the state, over its denominator, and of the token in it."""
    b_top = tl.maximum(b_p, b_logit)
    b_old, b_new = tl.exp(b_p - b_top), tl.exp(b_logit - b_top)
    b_inverse = 1.0 / (b_old * b_b + b_new)
    b_old, b_new = b_old * b_inverse, b_new * b_inverse
    return b_old * b_a + b_new * b_v, b_old, b_new


@triton.jit
def write(b_a, b_b, b_p, b_log, b_k, b_v):
    """The state after a token, and the weights of the state before it and of the token."""
    b_top = tl.maximum(b_p + b_log, b_k)
    b_old, b_new = tl.exp(b_p + b_log - b_top), tl.exp(b_k - b_top)
    return b_old * b_a + b_new * b_v, b_old * b_b + b_new, b_top, b_old, b_new
