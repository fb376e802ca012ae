"""What a chunk of the general form does to its own tokens: decays of what reads the state before its token, and scores of pairs.

With G the sums of log decays from the start of the chunk up to each token, a query reads `exp(G_t - G_s)` of what token s wrote,
and b, which reads before its token's decay, `exp(G_(t-1) - G_s)`.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

from ejkernel_triton.delta_rule.tiles import narrow, product
from ejkernel_triton.linear_recurrence.tiles import LOG2_E, level_decays, level_pairs, mild_exponents, select_sums


@triton.jit
def exponents_before(b_log, b_up_to, CHUNK: tl.constexpr, R: tl.constexpr):
    """Exponents of the decays from the start of the chunk up to the token before each."""
    if R.bfloat16:
        b_before = tl.minimum(b_up_to - b_log * LOG2_E, 0.0)
    else:
        o_row = tl.arange(0, CHUNK)
        b_matrix = tl.where(o_row[:, None] > o_row[None, :], 1.0, 0.0).to(tl.bfloat16)
        b_before = select_sums(b_matrix, b_log, R.exact_logs) * LOG2_E
    return b_before


@triton.jit
def mild_factors(b_log, b_up_to):
    """`mild_exponents` to each token and to the one before it, and the tokens for which they are mild, as a column."""
    b_start, m_mild = mild_exponents(b_up_to)
    return b_start, tl.where(m_mild[:, None], tl.minimum(b_up_to - b_log * LOG2_E, 0.0), 0.0), m_mild[:, None]


@triton.jit
def level_decays_before(b_log, level, CHUNK: tl.constexpr, R: tl.constexpr):
    """In blocks of 2^(level + 1) tokens: the decay from the middle to the token before each in the later half."""
    o_row = tl.arange(0, CHUNK)
    o_middle = (o_row >> level | 1) << level
    m_between = (o_row[None, :] >= o_middle[:, None]) & (o_row[None, :] < o_row[:, None])
    return tl.exp2(select_sums(tl.where(m_between, 1.0, 0.0).to(tl.bfloat16), b_log, R.exact_logs) * LOG2_E)


@triton.jit
def add_scores(
    b_scores_key, b_scores_a, b_reads_key, b_reads_a, b_query, b_key, b_a, b_b, b_log, b_up_to, CHUNK: tl.constexpr,
    LEVELS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Add to the products of queries, and of b, with keys and a, under the decays between them, what a block of channels gives.

    Entries of pairs whose column is later than the row, and those of b on the diagonal, have no meaning.
    """
    o_row = tl.arange(0, CHUNK)
    b_start, b_before, m_mild = mild_factors(b_log, b_up_to)
    b_read, b_correct = narrow(b_query * tl.exp2(b_start), R), narrow(b_b * tl.exp2(b_before), R)
    b_inverse = tl.exp2(-b_start)
    b_right = tl.trans(narrow(b_key * b_inverse, R))
    b_scores_key += tl.where(m_mild, product(b_read, b_right, R), 0.0)
    b_reads_key += tl.where(m_mild, product(b_correct, b_right, R), 0.0)
    b_right = tl.trans(narrow(b_a * b_inverse, R))
    b_scores_a += tl.where(m_mild, product(b_read, b_right, R), 0.0)
    b_reads_a += tl.where(m_mild, product(b_correct, b_right, R), 0.0)
    if tl.sum(tl.sum(m_mild.to(tl.int32), axis=1), axis=0) < CHUNK:
        m_same = (o_row[:, None] == o_row[None, :]) & (m_mild == 0)
        b_scores_key += tl.where(m_same, tl.sum(b_query * b_key, axis=1)[:, None], 0.0)
        b_scores_a += tl.where(m_same, tl.sum(b_query * b_a, axis=1)[:, None], 0.0)
        for i_level in range(LEVELS):
            b_factor = level_decays(b_log, i_level, CHUNK, R)
            m_pairs = level_pairs(i_level, CHUNK, False) & (m_mild == 0)
            b_read = narrow(b_query * b_factor, R)
            b_correct = narrow(b_b * level_decays_before(b_log, i_level, CHUNK, R), R)
            b_right = tl.trans(narrow(b_key * b_factor, R))
            b_scores_key += tl.where(m_pairs, product(b_read, b_right, R), 0.0)
            b_reads_key += tl.where(m_pairs, product(b_correct, b_right, R), 0.0)
            b_right = tl.trans(narrow(b_a * b_factor, R))
            b_scores_a += tl.where(m_pairs, product(b_read, b_right, R), 0.0)
            b_reads_a += tl.where(m_pairs, product(b_correct, b_right, R), 0.0)
    return b_scores_key, b_scores_a, b_reads_key, b_reads_a


@triton.jit
def through_scores(
    b_d_query, b_d_key, b_d_a, b_d_b, b_d_scores_key, b_d_scores_a, b_d_reads_key, b_d_reads_a, b_query, b_key, b_a, b_b, b_log,
    b_up_to, CHUNK: tl.constexpr, LEVELS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of a block of channels what those of `add_scores` give; they are 0 where there is no pair."""
    o_row = tl.arange(0, CHUNK)
    b_start, b_before, m_mild = mild_factors(b_log, b_up_to)
    b_read, b_correct = tl.exp2(b_start), tl.exp2(b_before)
    b_inverse = tl.exp2(-b_start)
    b_left_key, b_left_a = narrow(b_key * b_inverse, R), narrow(b_a * b_inverse, R)
    b_pairs_key, b_pairs_a = tl.where(m_mild, b_d_scores_key, 0.0), tl.where(m_mild, b_d_scores_a, 0.0)
    b_reads_key, b_reads_a = tl.where(m_mild, b_d_reads_key, 0.0), tl.where(m_mild, b_d_reads_a, 0.0)
    b_d_query += b_read * (product(b_pairs_key, b_left_key, R) + product(b_pairs_a, b_left_a, R))
    b_d_b += b_correct * (product(b_reads_key, b_left_key, R) + product(b_reads_a, b_left_a, R))
    b_left, b_right = narrow(b_query * b_read, R), narrow(b_b * b_correct, R)
    b_d_key += b_inverse * (product(tl.trans(b_pairs_key), b_left, R) + product(tl.trans(b_reads_key), b_right, R))
    b_d_a += b_inverse * (product(tl.trans(b_pairs_a), b_left, R) + product(tl.trans(b_reads_a), b_right, R))
    if tl.sum(tl.sum(m_mild.to(tl.int32), axis=1), axis=0) < CHUNK:
        b_d_scores_key, b_d_scores_a = (b_d_scores_key - b_pairs_key), (b_d_scores_a - b_pairs_a)
        b_d_reads_key, b_d_reads_a = (b_d_reads_key - b_reads_key), (b_d_reads_a - b_reads_a)
        m_same = o_row[:, None] == o_row[None, :]
        b_same_key = tl.sum(tl.where(m_same, b_d_scores_key.to(tl.float32), 0.0), axis=1)[:, None]
        b_same_a = tl.sum(tl.where(m_same, b_d_scores_a.to(tl.float32), 0.0), axis=1)[:, None]
        b_d_query += b_same_key * b_key + b_same_a * b_a
        b_d_key += b_same_key * b_query
        b_d_a += b_same_a * b_query
        for i_level in range(LEVELS):
            b_factor = level_decays(b_log, i_level, CHUNK, R)
            b_correct = level_decays_before(b_log, i_level, CHUNK, R)
            m_pairs = level_pairs(i_level, CHUNK, False)
            b_pairs_key, b_pairs_a = tl.where(m_pairs, b_d_scores_key, 0.0), tl.where(m_pairs, b_d_scores_a, 0.0)
            b_reads_key, b_reads_a = tl.where(m_pairs, b_d_reads_key, 0.0), tl.where(m_pairs, b_d_reads_a, 0.0)
            b_left_key, b_left_a = narrow(b_key * b_factor, R), narrow(b_a * b_factor, R)
            b_d_query += b_factor * (product(b_pairs_key, b_left_key, R) + product(b_pairs_a, b_left_a, R))
            b_d_b += b_correct * (product(b_reads_key, b_left_key, R) + product(b_reads_a, b_left_a, R))
            b_left, b_right = narrow(b_query * b_factor, R), narrow(b_b * b_correct, R)
            b_d_key += b_factor * (product(tl.trans(b_pairs_key), b_left, R) + product(tl.trans(b_reads_key), b_right, R))
            b_d_a += b_factor * (product(tl.trans(b_pairs_a), b_left, R) + product(tl.trans(b_reads_a), b_right, R))
    return b_d_query, b_d_key, b_d_a, b_d_b
