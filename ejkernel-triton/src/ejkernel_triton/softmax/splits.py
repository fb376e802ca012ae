"""Device functions for splits of softmax rows: partial sums, and the results from the combined sums."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
import triton
import triton.language as tl

from ejkernel_triton._rows.cooperative import upcast
from ejkernel_triton.softmax.mask import masked

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Lower bound of a row's maximum: exp(-inf - LOWEST) is 0 and not NaN."""


@triton.jit
def logits_of(b_x, m_where, SCALE: tl.constexpr):
    """Scaled x, -inf where it is masked or -inf itself, whatever the sign of the scale."""
    if SCALE <= 0:
        m_where = m_where & (b_x != float("-inf"))
    return tl.where(m_where, b_x * SCALE, float("-inf"))


@triton.jit
def split_offsets(i_row, i_split, p_where, middle, inner, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WHERE: tl.constexpr):
    """Offsets of a split of a row [1, BLOCK], its in-bounds mask, and that mask with `where` applied."""
    i_rows = i_row + tl.arange(0, 1)  # [1]
    o_width = i_split * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_tile = (o_width < WIDTH)[None, :]
    o_tile = i_rows.to(tl.int64)[:, None] * WIDTH + o_width[None, :]
    return o_tile, m_tile, masked(m_tile, p_where, i_rows, i_rows >= 0, o_width, middle, inner, WIDTH, WHERE)


@triton.jit
def store_partial_sums(b_x, b_stored, m_where, p_sum, items, zero, SCALE: tl.constexpr):
    """Store the maximum and the sum of the weights of a split [1, BLOCK]."""
    b_x = logits_of(b_x, m_where, SCALE)
    b_split_max = tl.maximum(tl.max(b_x, axis=1), LOWEST)  # [1]
    tl.store(p_sum, b_split_max)
    b_x = logits_of(upcast(b_stored, zero), m_where, SCALE)
    tl.store(p_sum + items, tl.sum(tl.exp(b_x - b_split_max[:, None]), axis=1))


@triton.jit
def combine_sums(p_sums, items, i_row, SPLITS: tl.constexpr, SPLITS_BLOCK: tl.constexpr):
    """Combine the partial sums of a row to its maximum and the inverse of the sum of its weights."""
    o_split = tl.arange(0, SPLITS_BLOCK)
    p_split = p_sums + i_row * SPLITS + o_split
    b_maxima = tl.load(p_split, mask=o_split < SPLITS, other=LOWEST, cache_modifier=".cg")  # [PARTS_BLOCK]
    b_sums_of_splits = tl.load(p_split + items, mask=o_split < SPLITS, other=0.0, cache_modifier=".cg")  # [PARTS_BLOCK]
    b_max = tl.max(b_maxima)
    b_sum = tl.sum(b_sums_of_splits * tl.exp(b_maxima - b_max))
    return b_max, 1.0 / tl.where(b_sum == 0.0, 1.0, b_sum)


@triton.jit
def forward_of_split(b_stored, m_where, b_max, b_inverse, zero, SCALE: tl.constexpr):
    b_x = logits_of(upcast(b_stored, zero), m_where, SCALE)
    return tl.exp(b_x - b_max) * b_inverse


@triton.jit
def combine_products(p_sums, i_row, SPLITS: tl.constexpr, SPLITS_BLOCK: tl.constexpr):
    """The sum of `out * grad` over a row."""
    o_split = tl.arange(0, SPLITS_BLOCK)
    return tl.sum(tl.load(p_sums + i_row * SPLITS + o_split, mask=o_split < SPLITS, other=0.0, cache_modifier=".cg"))


@triton.jit
def backward_of_split(b_out, b_grad, b_sum, zero, SCALE: tl.constexpr):
    return upcast(b_out, zero) * (upcast(b_grad, zero) - b_sum) * SCALE
