"""Parts of rows of softmax: their sums, and their results from everybody's."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
import triton
import triton.language as tl

from ejkernel_triton._rows.meeting import widened
from ejkernel_triton.softmax.mask import masked

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Instead of -inf as the largest value of rows without one: exp(-inf - LOWEST) is 0 and not NaN."""


@triton.jit
def place_of(i_row, i_part, p_where, middle, inner, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WHERE: tl.constexpr):
    """Offsets of a part of a row [1, BLOCK], the places that there are, and those that take part."""
    i_rows = i_row + tl.arange(0, 1)  # [1]
    o_width = i_part * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_tile = (o_width < WIDTH)[None, :]
    o_tile = i_rows.to(tl.int64)[:, None] * WIDTH + o_width[None, :]
    return o_tile, m_tile, masked(m_tile, p_where, i_rows, i_rows >= 0, o_width, middle, inner, WIDTH, WHERE)


@triton.jit
def part_sums(b_x, b_stored, m_part, p_sum, items, zero, SCALE: tl.constexpr):
    """Store the largest value of a part [1, BLOCK], in float32 and as it is stored, and the sum of its weights [1]."""
    b_x = tl.where(m_part, b_x * SCALE, float("-inf"))
    b_part_largest = tl.maximum(tl.max(b_x, axis=1), LOWEST)  # [1]
    tl.store(p_sum, b_part_largest)
    b_x = tl.where(m_part, widened(b_stored, zero) * SCALE, float("-inf"))
    tl.store(p_sum + items, tl.sum(tl.exp(b_x - b_part_largest[:, None]), axis=1))


@triton.jit
def sums_of_parts(p_sums, items, i_row, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr):
    """The largest value of a row, and the inverse of the sum of its weights."""
    o_part = tl.arange(0, PARTS_BLOCK)
    p_part = p_sums + i_row * PARTS + o_part
    b_largests = tl.load(p_part, mask=o_part < PARTS, other=LOWEST, cache_modifier=".cg")  # [PARTS_BLOCK]
    b_totals = tl.load(p_part + items, mask=o_part < PARTS, other=0.0, cache_modifier=".cg")  # [PARTS_BLOCK]
    b_largest = tl.max(b_largests)
    b_total = tl.sum(b_totals * tl.exp(b_largests - b_largest))
    return b_largest, 1.0 / tl.where(b_total == 0.0, 1.0, b_total)


@triton.jit
def forward_of_part(b_stored, m_part, b_largest, b_inverse, zero, SCALE: tl.constexpr):
    b_x = tl.where(m_part, widened(b_stored, zero) * SCALE, float("-inf"))
    return tl.exp(b_x - b_largest) * b_inverse


@triton.jit
def sum_of_products(p_sums, i_row, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr):
    """The sum of `out * grad` over a row."""
    o_part = tl.arange(0, PARTS_BLOCK)
    return tl.sum(tl.load(p_sums + i_row * PARTS + o_part, mask=o_part < PARTS, other=0.0, cache_modifier=".cg"))


@triton.jit
def backward_of_part(b_out, b_grad, b_sum, zero, SCALE: tl.constexpr):
    return widened(b_out, zero) * (widened(b_grad, zero) - b_sum) * SCALE
