"""Device functions that select the largest of a program's scores, by bisection over their bits and without a sort."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false
import triton
import triton.language as tl


@triton.jit
def order_of(b_score, m_entry):
    """int32 in the order of the scores, both zeros being equal; the lowest int32, which is the order of no number, elsewhere."""
    b_score = tl.where(b_score == 0.0, 0.0, b_score)
    return tl.where(m_entry, _reordered(b_score.to(tl.int32, bitcast=True)), -2147483648)


@triton.jit
def score_of(b_order):
    return _reordered(b_order).to(tl.float32, bitcast=True)


@triton.jit
def _reordered(b_bits):
    """int32 in the order of the floats with these bits; its own inverse."""
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def select_largest(b_order, m_entry, COUNT):
    """The COUNT largest of up to 2 ** 14 scores by their `order_of`, the earlier ones of equals: a mask, their places among each
    other, and how many they are."""
    # At least COUNT are `low` or more, unless there are fewer; fewer than COUNT are `high` or more.
    low = tl.min(tl.where(m_entry, b_order, 2147483647), axis=0)
    high = tl.max(b_order, axis=0) + 1
    reached = tl.sum(m_entry.to(tl.int32), axis=0)
    while (reached > COUNT) & (low + 1 < high):
        middle = (low & high) + ((low ^ high) >> 1)
        count = tl.sum((b_order >= middle).to(tl.int32), axis=0)
        enough = count >= COUNT
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        reached = tl.where(enough, count, reached)

    m_above = m_entry & (b_order > low)
    m_equal = m_entry & (b_order == low)
    needed = COUNT - tl.sum(m_above.to(tl.int32), axis=0)
    # Two counts are summed as the halves of one int32.
    b_counts = tl.cumsum((m_above.to(tl.int32) << 16) | m_equal.to(tl.int32), axis=0)  # [BLOCK]
    b_equal = b_counts & 0xFFFF
    b_place = (b_counts >> 16) + tl.minimum(b_equal, needed) - 1
    return m_above | (m_equal & (b_equal <= needed)), b_place, tl.minimum(reached, COUNT)
