"""Device functions of the gradients of attention over latents: weights are formed again from the log-sum-exp.

Rows come first in all products, keys second: a tile of rows is the long side of an MMA instruction, also where keys are few. What
keys get is summed transposed, so that channels take that side. P has `rest`, `soft_cap` and `precision`.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
import triton
import triton.language as tl

from ejkernel_triton._latents.tiles import LOG2E
from ejkernel_triton._stored import finite_rows, load_rows


@triton.jit
def load_key(
    p_key,
    o_key,
    m_key,
    V: tl.constexpr,
    REST: tl.constexpr,
    REST_AT: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Latents `[BLOCK_K, BLOCK_V]` and what is beside them `[BLOCK_K, BLOCK_REST]`, with 0 for what is not finite, and for each key
    that had such NaN, else 0, `[BLOCK_K]`."""
    b_latent, b_lost = finite_rows(load_rows(p_key, o_key, m_key, V, BLOCK_V, DTYPE), 1)
    b_rest = b_latent
    if REST > 0:
        b_rest, b_lost_rest = finite_rows(load_rows(p_key + REST_AT, o_key, m_key, REST, BLOCK_REST, DTYPE), 1)
        b_lost += b_lost_rest
    return b_latent, b_rest, b_lost


@triton.jit
def weights_of(
    b_query,
    b_query_rest,
    b_grad,
    b_lse,
    b_latent,
    b_rest,
    b_lost,
    m_seen,
    b_factor,
    P: tl.constexpr,
):
    """Products of queries and keys, weights, derivatives of the soft cap, and products of the cotangent and the latents, all
    `[BLOCK_M, BLOCK_K]`."""
    b_raw = tl.dot(b_query, tl.trans(b_latent), input_precision=P.precision)
    if P.rest > 0:
        b_raw = tl.dot(b_query_rest, tl.trans(b_rest), b_raw, input_precision=P.precision)
    b_raw += b_lost[None, :]
    b_logit = b_raw * b_factor
    b_cap = tl.full(b_raw.shape, 1.0, tl.float32)
    if P.soft_cap > 0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        b_capped = 1.0 - 2.0 / (tl.exp2(b_logit * (2.0 * LOG2E / P.soft_cap)) + 1.0)
        b_logit = P.soft_cap * b_capped
        b_cap = 1.0 - b_capped * b_capped
    b_weight = tl.where(m_seen, tl.exp2((b_logit - b_lse[:, None]) * LOG2E), 0.0)
    b_product = tl.dot(b_grad, tl.trans(b_latent), input_precision=P.precision)
    return b_raw, b_weight, b_cap, b_product


@triton.jit
def add_to_queries(b_acc, b_acc_rest, b_raw_grad, b_latent, b_rest, P: tl.constexpr):
    b_raw_grad = b_raw_grad.to(b_latent.dtype)
    b_acc = tl.dot(b_raw_grad, b_latent, b_acc, input_precision=P.precision)
    if P.rest > 0:
        b_acc_rest = tl.dot(b_raw_grad, b_rest, b_acc_rest, input_precision=P.precision)
    return b_acc, b_acc_rest


@triton.jit
def add_to_keys(b_acc, b_acc_rest, b_raw_grad, b_weight, b_query, b_query_rest, b_grad, P: tl.constexpr):
    """b_acc `[BLOCK_V, BLOCK_K]`, of keys and of values; b_acc_rest `[BLOCK_REST, BLOCK_K]`."""
    b_raw_grad = b_raw_grad.to(b_query.dtype)
    b_acc = tl.dot(tl.trans(b_query), b_raw_grad, b_acc, input_precision=P.precision)
    b_acc = tl.dot(tl.trans(b_grad), b_weight.to(b_query.dtype), b_acc, input_precision=P.precision)
    if P.rest > 0:
        b_acc_rest = tl.dot(tl.trans(b_query_rest), b_raw_grad, b_acc_rest, input_precision=P.precision)
    return b_acc, b_acc_rest


@triton.jit
def load_lse(p_lse, o_row, m_row):
    """That of a row without a weight becomes infinite, so that it has none."""
    b_lse = tl.load(p_lse + o_row, mask=m_row, other=float("-inf"))
    return tl.where(b_lse == float("-inf"), float("inf"), b_lse)


@triton.jit
def store_sums(p_out, o_row, m_row, b_rows, SIZE: tl.constexpr):
    o_size = tl.arange(0, b_rows.shape[1])
    p_tile = p_out + o_row[:, None] + o_size[None, :]
    tl.store(p_tile, b_rows.to(p_out.dtype.element_ty), mask=m_row[:, None] & (o_size < SIZE)[None, :])
