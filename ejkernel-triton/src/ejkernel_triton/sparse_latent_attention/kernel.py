"""The forward phase: a program gathers the tokens that a query names, block by block, for some or all of its heads.

A row is loaded once, as key and as value (DeepSeek-AI, DeepSeek-V3.2, 2025, section 2.1). With several splits of the tokens,
partial results are summed by a second kernel. Backward needs only `out` and `lse`.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.sparse_latent_attention.interface import (
    SparseLatentAttentionCall,
    SparseLatentAttentionInputs,
    SparseLatentAttentionOutputs,
)
from ejkernel_triton._blocks import dot_block, next_power_of_2
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._latents.combine import combined
from ejkernel_triton._latents.config import LatentAttentionConfig
from ejkernel_triton._latents.tiles import attend, store_rows
from ejkernel_triton._numerics import dot_precision
from ejkernel_triton._stored import load_rows
from ejkernel_triton.sparse_latent_attention.gradients import backward

__all__ = ["backward", "forward"]

_MAX_SEARCH_BLOCK = 1024
"""Most slots of a query that are searched at once for those that name a token."""


@triton.jit
def _slots_in_use(p_indices, slots, BLOCK: tl.constexpr):
    """The first slot that names a token, and the one after the last."""
    first = slots
    last = 0
    for i_start in range(0, slots, BLOCK):
        o_slot = i_start + tl.arange(0, BLOCK)
        m_used = tl.load(p_indices + o_slot, mask=o_slot < slots, other=-1) >= 0  # [BLOCK]
        first = tl.minimum(first, tl.min(tl.where(m_used, o_slot, slots), axis=0))
        last = tl.maximum(last, tl.max(tl.where(m_used, o_slot + 1, 0), axis=0))
    return first, last


@triton.jit
def sparse_latent_attention_kernel(
    p_query,
    p_key_value,
    p_indices,
    queries,
    tokens,
    slots,
    p_out,
    p_lse,
    SCALE: tl.constexpr,
    V: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BATCH: tl.constexpr,
    LONG: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_OF_TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    SAVE_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    SEARCH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One split of the tokens of a query, for a tile of its heads. Tiles of one query run beside each other."""
    HEAD_TILES: tl.constexpr = (HEADS + HEADS_OF_TILE - 1) // HEADS_OF_TILE
    CHANNELS: tl.constexpr = V + REST
    DTYPE: tl.constexpr = p_query.dtype.element_ty
    i_head_tile = tl.program_id(0) % HEAD_TILES
    i_split = tl.program_id(0) // HEAD_TILES % SPLITS
    i_query = tl.program_id(0) // HEAD_TILES // SPLITS  # of all members of the batch
    i_row = tl.arange(0, BLOCK_M)
    i_head = i_head_tile * HEADS_OF_TILE + i_row
    m_row = (i_row < HEADS_OF_TILE) & (i_head < HEADS)
    o_row = i_query.to(tl.int64) * HEADS + i_head  # [BLOCK_M]
    p_indices += i_query.to(tl.int64) * slots
    p_key_value += (i_query // queries).to(tl.int64) * tokens * CHANNELS
    first, last = _slots_in_use(p_indices, slots, SEARCH)
    i_low_block = first // BLOCK_K
    blocks = tl.maximum(tl.cdiv(last, BLOCK_K) - i_low_block, 0)
    blocks_of_split = tl.cdiv(blocks, SPLITS)
    i_begin = i_low_block + tl.minimum(i_split * blocks_of_split, blocks)
    i_stop = i_low_block + tl.minimum((i_split + 1) * blocks_of_split, blocks)

    b_query = load_rows(p_query, o_row * CHANNELS, m_row, V, BLOCK_V, DTYPE)  # [BLOCK_M, BLOCK_V]
    b_query_rest = b_query
    if REST > 0:
        b_query_rest = load_rows(p_query + V, o_row * CHANNELS, m_row, REST, BLOCK_REST, DTYPE)  # [BLOCK_M, BLOCK_REST]
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_V, BLOCK_M] if KEYS_FIRST else [BLOCK_M, BLOCK_V], tl.float32)
    for i_block in tl.range(i_begin, i_stop, num_stages=STAGES):
        o_slot = i_block * BLOCK_K + tl.arange(0, BLOCK_K)
        i_token = tl.load(p_indices + o_slot, mask=o_slot < slots, other=-1)  # [BLOCK_K]
        m_key = i_token >= 0
        o_key = (i_token.to(tl.int64) if LONG else i_token) * CHANNELS
        b_latent = load_rows(p_key_value, o_key, m_key, V, BLOCK_V, DTYPE)  # [BLOCK_K, BLOCK_V]
        b_rest = b_latent
        if REST > 0:
            b_rest = load_rows(p_key_value + V, o_key, m_key, REST, BLOCK_REST, DTYPE)  # [BLOCK_K, BLOCK_REST]
        b_max, b_sum, b_acc = attend(
            b_query, b_query_rest, b_max, b_sum, b_acc, b_latent, b_rest, m_key, SCALE, REST, 0.0, KEYS_FIRST, False, PRECISION
        )
    if SPLITS > 1:
        o_row += i_split.to(tl.int64) * BATCH * queries * HEADS
    store_rows(b_max, b_sum, b_acc, 1.0, o_row, m_row, p_out, p_lse, V, BLOCK_V, KEYS_FIRST, SAVE_LSE, SPLITS > 1)


def forward(
    call: SparseLatentAttentionCall, inputs: SparseLatentAttentionInputs, config: LatentAttentionConfig
) -> SparseLatentAttentionOutputs:
    batch, queries, heads, size = call.query.shape
    tokens, slots = call.key_value.shape[1], call.token_indices.shape[2]
    if config.block_q != 1:
        raise ValueError(f"block_q: got {config.block_q}, expected 1: every query names tokens of its own")
    save_lse = call.return_lse or call.save_residuals
    rows = (batch, queries, heads)
    if batch * queries * tokens * slots == 0:
        lse = jnp.full(rows, -jnp.inf, jnp.float32) if save_lse else None
        return SparseLatentAttentionOutputs(jnp.zeros((*rows, call.value_size), call.query.dtype), lse)
    split = (config.splits,) if config.splits > 1 else ()
    rest = size - call.value_size
    out, lse = call_kernel(
        sparse_latent_attention_kernel,
        (*inputs, queries, tokens, slots),
        (
            ((*split, *rows, call.value_size), jnp.float32 if split else call.query.dtype),
            ((*split, *rows) if save_lse or split else (1,), jnp.float32),
        ),
        grid=batch * queries * config.splits * -(-heads // config.block_h),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        SCALE=call.softmax_scale,
        V=call.value_size,
        REST=rest,
        BLOCK_V=dot_block(call.value_size),
        BLOCK_REST=dot_block(rest),
        BLOCK_M=config.rows,
        BLOCK_K=config.block_k,
        BATCH=batch,
        LONG=tokens * size >= 2**31,  # wide offsets take registers
        HEADS=heads,
        HEADS_OF_TILE=config.block_h,
        SPLITS=config.splits,
        KEYS_FIRST=config.keys_first,
        SAVE_LSE=save_lse,
        PRECISION=dot_precision(None, call.query.dtype),
        SEARCH=min(_MAX_SEARCH_BLOCK, next_power_of_2(slots)),
        STAGES=config.num_stages + 1,  # numbers of tokens are loaded a stage before the tokens
    )
    if split:
        out, lse = combined(out, lse, call.query.dtype, save_lse=save_lse)
    return SparseLatentAttentionOutputs(out, lse if save_lse else None)
