"""Device functions of attention over latents: a tile of query rows, its online softmax over blocks of keys, its results.

A key is a latent and the rest beside it (its rotary part); the latent is the value too. Logits are base-2 exponents.

With KEYS_FIRST all products are transposed: keys, and channels of the values, are the long side of an MMA instruction, which has
at least 64 of them on Hopper, and few rows waste nothing.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def along_keys(b, KEYS_FIRST: tl.constexpr):
    return b[:, None] if KEYS_FIRST else b[None, :]


@triton.jit
def along_rows(b, KEYS_FIRST: tl.constexpr):
    return b[None, :] if KEYS_FIRST else b[:, None]


@triton.jit
def products(b_query, b_key, KEYS_FIRST: tl.constexpr, PRECISION: tl.constexpr):
    """`[BLOCK_K, BLOCK_M]` if KEYS_FIRST, else `[BLOCK_M, BLOCK_K]`."""
    if KEYS_FIRST:
        return tl.dot(b_key, tl.trans(b_query), input_precision=PRECISION)
    else:
        return tl.dot(b_query, tl.trans(b_key), input_precision=PRECISION)


@triton.jit
def attend(
    b_query,
    b_query_rest,
    b_max,
    b_sum,
    b_acc,
    b_latent,
    b_rest,
    m_visible,
    b_factor,
    REST: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online-softmax update with one block of keys.

    `m_visible` says which keys all rows see; if MASKED, which each row sees. Then a non-finite value must reach only rows that
    see it, although every row multiplies it by its weight.
    """
    KEYS: tl.constexpr = 0 if KEYS_FIRST else 1
    b_logit = products(b_query, b_latent, KEYS_FIRST, PRECISION)
    if REST > 0:
        b_logit += products(b_query_rest, b_rest, KEYS_FIRST, PRECISION)
    if SOFT_CAP > 0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), with factor = 2 scale / cap
        b_logit = SOFT_CAP * LOG2E * (1.0 - 2.0 / (tl.exp2(b_logit * (b_factor * LOG2E)) + 1.0))
    else:
        b_logit = b_logit * (b_factor * LOG2E)
    b_logit = tl.where(m_visible if MASKED else along_keys(m_visible, KEYS_FIRST), b_logit, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_logit, axis=KEYS))
    b_finite = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_rescale = tl.exp2(b_max - b_finite)
    b_weight = tl.exp2(b_logit - along_rows(b_finite, KEYS_FIRST))
    if MASKED:
        m_finite = b_latent - b_latent == 0.0
        m_nonfinite = tl.min(m_finite.to(tl.int32), axis=1) == 0  # [BLOCK_K]
        b_latent = tl.where(m_finite, b_latent, 0.0)
        b_weight = tl.where(m_visible & along_keys(m_nonfinite, KEYS_FIRST), float("nan"), b_weight)
    b_sum = b_sum * b_rescale + tl.sum(b_weight, axis=KEYS)
    b_acc = b_acc * along_rows(b_rescale, KEYS_FIRST)
    if KEYS_FIRST:
        b_acc = tl.dot(tl.trans(b_latent), b_weight.to(b_latent.dtype), b_acc, input_precision=PRECISION)
    else:
        b_acc = tl.dot(b_weight.to(b_latent.dtype), b_latent, b_acc, input_precision=PRECISION)
    return b_new_max, b_sum, b_acc


@triton.jit
def store_rows(
    b_max,
    b_sum,
    b_acc,
    b_factor,
    o_row,
    m_row,
    p_out,
    p_lse,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    SAVE_LSE: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Write a tile's results; 0 and -inf for a row that sees no key. Partial ones are not multiplied by the factor, and keep
    their log-sum-exp in base 2."""
    m_empty = b_sum == 0.0
    b_scale = 1.0 / tl.where(m_empty, 1.0, b_sum)
    b_lse = tl.where(m_empty, float("-inf"), b_max + tl.log2(tl.where(m_empty, 1.0, b_sum)))
    if not PARTIAL:
        b_scale *= b_factor
        b_lse *= LN2
    b_out = b_acc * along_rows(b_scale, KEYS_FIRST)
    if KEYS_FIRST:
        b_out = tl.trans(b_out)  # [BLOCK_M, BLOCK_V]
    o_value = tl.arange(0, BLOCK_V)
    m_out = m_row[:, None] & (o_value < V)[None, :]
    tl.store(p_out + o_row[:, None] * V + o_value[None, :], b_out.to(p_out.dtype.element_ty), mask=m_out)
    if SAVE_LSE or PARTIAL:
        tl.store(p_lse + o_row, b_lse, mask=m_row)
