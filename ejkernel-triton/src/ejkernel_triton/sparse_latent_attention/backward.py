"""The kernels of the backward phase: gradients of queries; what every query adds to the tokens that it names; its sums by token.

What is added is written to memory, and summed in the order of the queries, so that equal inputs give equal bits.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
import triton
import triton.language as tl

from ejkernel_triton._latents.gradients import add_to_keys, add_to_queries, load_key, load_lse, store_sums, weights_of
from ejkernel_triton._stored import load_rows


@triton.jit
def load_query(p_query, p_grad, o_row, m_row, P: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_REST: tl.constexpr):
    """The channels of queries that meet values, those beside them, and cotangents. [BLOCK_M, ...]"""
    DTYPE: tl.constexpr = p_query.dtype.element_ty
    b_query = load_rows(p_query, o_row * (P.latent + P.rest), m_row, P.latent, BLOCK_V, DTYPE)
    b_query_rest = b_query
    if P.rest > 0:
        b_query_rest = load_rows(p_query + P.latent, o_row * (P.latent + P.rest), m_row, P.rest, BLOCK_REST, DTYPE)
    return b_query, b_query_rest, load_rows(p_grad, o_row * P.latent, m_row, P.latent, BLOCK_V, DTYPE)


@triton.jit
def load_tokens(
    p_key_value, p_indices, i_first, slots, P: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """The tokens in slots from i_first on, as `load_key` gives them, and which slots name one."""
    o_slot = i_first + tl.arange(0, BLOCK_K)
    i_token = tl.load(p_indices + o_slot, mask=o_slot < slots, other=-1)  # [BLOCK_K]
    m_key = i_token >= 0
    b_latent, b_rest, b_lost = load_key(
        p_key_value, i_token.to(tl.int64) * (P.latent + P.rest), m_key, P.latent, P.rest, P.latent, BLOCK_V, BLOCK_REST,
        p_key_value.dtype.element_ty,
    )  # fmt: skip
    return b_latent, b_rest, b_lost, m_key


@triton.jit
def sparse_query_gradient_kernel(
    p_query,
    p_key_value,
    p_indices,
    p_grad,
    p_lse,
    p_mean,
    queries,
    tokens,
    slots,
    p_out,
    P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEADS_OF_TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Some or all heads of one query."""
    HEAD_TILES: tl.constexpr = (P.heads + HEADS_OF_TILE - 1) // HEADS_OF_TILE
    CHANNELS: tl.constexpr = P.latent + P.rest
    i_query = tl.program_id(0) // HEAD_TILES  # of all members of the batch
    i_row = tl.arange(0, BLOCK_M)
    i_head = tl.program_id(0) % HEAD_TILES * HEADS_OF_TILE + i_row
    m_row = (i_row < HEADS_OF_TILE) & (i_head < P.heads)
    o_row = i_query.to(tl.int64) * P.heads + i_head  # [BLOCK_M]
    p_indices += i_query.to(tl.int64) * slots
    p_key_value += (i_query // queries).to(tl.int64) * tokens * CHANNELS
    b_query, b_query_rest, b_grad = load_query(p_query, p_grad, o_row, m_row, P, BLOCK_V, BLOCK_REST)
    b_lse = load_lse(p_lse, o_row, m_row)
    b_mean = tl.load(p_mean + o_row, mask=m_row, other=0.0)
    b_acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    b_acc_rest = tl.zeros([BLOCK_M, BLOCK_REST], tl.float32)
    for i_first in tl.range(0, slots, BLOCK_K, num_stages=STAGES):
        b_latent, b_rest, b_lost, m_key = load_tokens(p_key_value, p_indices, i_first, slots, P, BLOCK_V, BLOCK_REST, BLOCK_K)
        m_seen = m_row[:, None] & m_key[None, :]
        _, b_weight, _, b_product = weights_of(
            b_query, b_query_rest, b_grad, b_lse, b_latent, b_rest, b_lost, m_seen, P.scale * 1.0, P
        )
        b_raw_grad = tl.where(m_seen, b_weight * (b_product - b_mean[:, None]), 0.0) * P.scale
        b_acc, b_acc_rest = add_to_queries(b_acc, b_acc_rest, b_raw_grad, b_latent, b_rest, P)
    store_sums(p_out, o_row * CHANNELS, m_row, b_acc, P.latent)
    if P.rest > 0:
        store_sums(p_out + P.latent, o_row * CHANNELS, m_row, b_acc_rest, P.rest)


@triton.jit
def sparse_part_kernel(
    p_query,
    p_key_value,
    p_indices,
    p_members,
    p_grad,
    p_lse,
    p_mean,
    tokens,
    slots,
    p_out,
    P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEADS_OF_TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """What one query adds to BLOCK_K of the tokens that it names, summed over all heads. `[queries, slots, channels]`"""
    HEAD_TILES: tl.constexpr = (P.heads + HEADS_OF_TILE - 1) // HEADS_OF_TILE
    CHANNELS: tl.constexpr = P.latent + P.rest
    blocks = tl.cdiv(slots, BLOCK_K)
    i_query = tl.program_id(0) // blocks
    i_first = tl.program_id(0) % blocks * BLOCK_K
    i_row = tl.arange(0, BLOCK_M)
    p_indices += i_query.to(tl.int64) * slots
    p_key_value += tl.load(p_members + i_query).to(tl.int64) * tokens * CHANNELS
    b_latent, b_rest, b_lost, m_key = load_tokens(p_key_value, p_indices, i_first, slots, P, BLOCK_V, BLOCK_REST, BLOCK_K)
    b_acc = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    b_acc_rest = tl.zeros([BLOCK_REST, BLOCK_K], tl.float32)
    for i_head_tile in tl.range(0, HEAD_TILES, num_stages=STAGES):
        i_head = i_head_tile * HEADS_OF_TILE + i_row
        m_row = (i_row < HEADS_OF_TILE) & (i_head < P.heads)
        o_row = i_query.to(tl.int64) * P.heads + i_head
        b_query, b_query_rest, b_grad = load_query(p_query, p_grad, o_row, m_row, P, BLOCK_V, BLOCK_REST)
        b_lse = load_lse(p_lse, o_row, m_row)
        b_mean = tl.load(p_mean + o_row, mask=m_row, other=0.0)
        m_seen = m_row[:, None] & m_key[None, :]
        _, b_weight, _, b_product = weights_of(
            b_query, b_query_rest, b_grad, b_lse, b_latent, b_rest, b_lost, m_seen, P.scale * 1.0, P
        )
        b_raw_grad = tl.where(m_seen, b_weight * (b_product - b_mean[:, None]), 0.0) * P.scale
        b_acc, b_acc_rest = add_to_keys(b_acc, b_acc_rest, b_raw_grad, b_weight, b_query, b_query_rest, b_grad, P)
    o_slot = i_first + tl.arange(0, BLOCK_K)
    o_out = (i_query.to(tl.int64) * slots + o_slot) * CHANNELS
    store_sums(p_out, o_out, m_key, tl.trans(b_acc), P.latent)
    if P.rest > 0:
        store_sums(p_out + P.latent, o_out, m_key, tl.trans(b_acc_rest), P.rest)


@triton.jit
def sparse_sum_kernel(p_parts, p_entries, p_entries_up_to, p_before, p_out, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the parts of a token, of all members of the batch, to what was summed before."""
    i_token = tl.program_id(0)
    o_channel = tl.arange(0, BLOCK)
    m_channel = o_channel < CHANNELS
    p_out += i_token.to(tl.int64) * CHANNELS
    b_sum = tl.load(p_out + o_channel, mask=m_channel, other=0.0)
    for i_entry in range(tl.load(p_entries_up_to + i_token), tl.load(p_entries_up_to + i_token + 1)):
        p_part = p_parts + tl.load(p_entries + i_entry).to(tl.int64) * CHANNELS
        b_sum += tl.load(p_part + o_channel, mask=m_channel, other=0.0)
    tl.store(p_out + o_channel, b_sum, mask=m_channel)
