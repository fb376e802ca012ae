"""The forward kernel: one program computes the query heads that share one list of blocks, of one query.

They are the rows of a tile, so every selected block is read once for all of them.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
import triton
import triton.language as tl

from ejkernel_triton.native_sparse_attention.tiles import LN2, LOG2E, load_tile, query_of, steps_of, store_tile, tokens_of


@triton.jit
def native_sparse_attention_forward_kernel(
    p_query, p_key, p_value, p_blocks, p_starts, length, p_out, p_lse, P: tl.constexpr, HAS_LSE: tl.constexpr
):  # fmt: skip
    i_batch, i_query, i_head, i_first = query_of(length, P)
    o_tokens = i_batch.to(tl.int64) * length
    o_row = i_first + tl.arange(0, P.block_g)  # heads of the group
    m_row = o_row < P.groups
    o_heads = (o_tokens + i_query) * P.heads + i_head * P.groups
    b_query = load_tile(p_query + o_heads * P.size, o_row, m_row, P.size, P.size, P.block_d)  # [block_g, block_d]
    p_keys = p_key + (o_tokens * P.key_heads + i_head) * P.size
    p_values = p_value + (o_tokens * P.key_heads + i_head) * P.value_size
    p_list = p_blocks + ((o_tokens + i_query) * P.key_heads + i_head) * P.slots
    i_start = 0
    if P.sequences > 0:
        i_start = tl.load(p_starts + (o_tokens if P.sequences == 2 else 0) + i_query)
    b_max = tl.full([P.block_g], float("-inf"), tl.float32)
    b_sum = tl.full([P.block_g], 0.0, tl.float32)
    b_acc = tl.full([P.block_g, P.block_v], 0.0, tl.float32)
    first, end = steps_of(p_list, P)
    for step in range(first, end):
        i_token, m_token = tokens_of(p_list, step, i_query, i_start, P)
        o_token = i_token.to(tl.int64)
        b_key = load_tile(p_keys, o_token, m_token, P.key_heads * P.size, P.size, P.block_d)  # [block_k, block_d]
        b_logit = tl.dot(b_query, tl.trans(b_key), input_precision=P.precision) * (P.scale * LOG2E)
        b_logit = tl.where(m_token[None, :], b_logit, float("-inf"))  # [block_g, block_k]
        b_new = tl.maximum(b_max, tl.max(b_logit, axis=1))
        b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_weight = tl.exp2(b_logit - b_shift[:, None])
        b_rescale = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_rescale + tl.sum(b_weight, axis=1)
        b_value = load_tile(p_values, o_token, m_token, P.key_heads * P.value_size, P.value_size, P.block_v)
        b_acc = tl.dot(b_weight.to(b_value.dtype), b_value, b_acc * b_rescale[:, None], input_precision=P.precision)
        b_max = b_new
    b_total = tl.where(b_sum == 0, 1.0, b_sum)
    store_tile(p_out + o_heads * P.value_size, b_acc / b_total[:, None], o_row, m_row, P.value_size, P.value_size, P.block_v)
    if HAS_LSE:
        b_lse = tl.where(b_sum == 0, float("-inf"), (b_max + tl.log2(b_total)) * LN2)
        tl.store(p_lse + o_heads + o_row, b_lse, mask=m_row)
