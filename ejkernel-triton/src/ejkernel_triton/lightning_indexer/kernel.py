"""Scores of a tile of tokens for one query after the other, then the largest of each query's.

The product has tokens as rows and heads as columns, so that the sum over the heads stays within a warp. Scores are written
once, in float32; only those of some queries are held. A program of the second kernel has up to 16384 scores of a query in its
registers and finds the k-th largest by bisection over their bits, which are ordered as integers; of more scores each program
keeps the k largest of its own, and another pass the largest of these.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.common.ranking import largest, over_rows
from ejkernel.operations.lightning_indexer.interface import (
    NO_TOKEN,
    LightningIndexerCall,
    LightningIndexerInputs,
    LightningIndexerOutputs,
)
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._numerics import dot_precision
from ejkernel_triton._ranking import order_of, score_of, select_largest
from ejkernel_triton._stored import load_rows
from ejkernel_triton.lightning_indexer.config import Config, channels_at_once, heads_at_once

_NUMBERS = 2**27
"""Scores that are held at once: 512 MiB."""
_SELECTED_AT_ONCE = 2**14
"""Scores of a program that selects."""
_LOWEST = tl.constexpr(float(jnp.finfo(jnp.float32).min))


@triton.jit
def index_scores_kernel(
    p_query,
    p_key,
    p_weights,
    p_ends,
    p_key_scale,
    queries,
    tokens,
    p_scores,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    COUNT: tl.constexpr,
    KEY_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Scores that no query sees are not written, nor those of a query that reads all that it sees."""
    DTYPE: tl.constexpr = p_query.dtype.element_ty
    HEAD_TILES: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    key_tiles = tl.cdiv(tokens, BLOCK_K)
    query_tiles = tl.cdiv(queries, BLOCK_Q)
    i_tile = tl.program_id(0) // key_tiles
    i_batch = (i_tile // query_tiles).to(tl.int64)
    i_first = (query_tiles - 1 - i_tile % query_tiles) * BLOCK_Q  # those that see most begin first
    o_token = tl.program_id(0) % key_tiles * BLOCK_K + tl.arange(0, BLOCK_K)
    i_token = tl.program_id(0) % key_tiles * BLOCK_K
    i_query_of_all = i_batch * queries + i_first
    m_token = o_token < tokens

    o_query = tl.arange(0, BLOCK_Q)
    b_end = tl.load(p_ends + i_query_of_all + o_query, mask=i_first + o_query < queries, other=0)  # [BLOCK_Q]
    last = tl.max(b_end, axis=0)
    if (last > i_token) & (last > COUNT):
        o_key = (i_batch * tokens + o_token) * SIZE
        b_key = load_rows(p_key, o_key, m_token, SIZE, BLOCK_SIZE, DTYPE)  # [BLOCK_K, BLOCK_SIZE]
        b_scale = tl.full([BLOCK_K], 1.0, tl.float32)
        if KEY_SCALE:
            b_scale = tl.load(p_key_scale + i_batch * tokens + o_token, mask=m_token, other=0.0)
        steps = tl.minimum(queries - i_first, BLOCK_Q)
        for i_query in tl.range(0, steps, num_stages=STAGES):
            b_score = tl.zeros([BLOCK_K], tl.float32)
            for i_head_tile in tl.static_range(HEAD_TILES):
                i_head = i_head_tile * BLOCK_H + tl.arange(0, BLOCK_H)
                m_head = i_head < HEADS
                o_head = (i_query_of_all + i_query) * HEADS + i_head
                b_query = load_rows(p_query, o_head * SIZE, m_head, SIZE, BLOCK_SIZE, DTYPE)  # [BLOCK_H, BLOCK_SIZE]
                b_weight = tl.load(p_weights + o_head, mask=m_head, other=0.0)
                b_product = tl.dot(b_key, tl.trans(b_query), input_precision=PRECISION)  # [BLOCK_K, BLOCK_H]
                b_product = tl.maximum(b_product, 0.0, propagate_nan=tl.PropagateNan.ALL) * b_weight[None, :]
                if HEADS % BLOCK_H:
                    b_product = tl.where(m_head[None, :], b_product, 0.0)  # an infinite key times no head
                b_score += tl.sum(b_product, axis=1)
            b_score *= b_scale
            b_score = tl.where(b_score >= _LOWEST, b_score, _LOWEST)
            tl.store(p_scores + (i_query_of_all + i_query) * tokens + o_token, b_score, mask=m_token & (o_token < last))


@triton.jit
def select_tokens_kernel(
    p_scores,
    p_places,
    p_ends,
    width,
    programs,
    p_tokens,
    p_kept,
    COUNT: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    NO_TOKEN: tl.constexpr,
):
    """The largest COUNT of some scores of a query, their tokens in ascending order; `programs` have the same query.

    The first pass knows where the scores end and that their places are the tokens; others read the tokens, and which there are.
    """
    i_row = (tl.program_id(0) // programs).to(tl.int64)
    o_entry = tl.program_id(0) % programs * BLOCK + tl.arange(0, BLOCK)
    if FIRST:
        end = tl.load(p_ends + i_row)
        b_token = o_entry
        m_entry = (o_entry < width) & (o_entry < end)
        m_scored = m_entry & (end > COUNT)
    else:
        b_token = tl.load(p_places + i_row * width + o_entry, mask=o_entry < width, other=NO_TOKEN)
        m_entry = b_token >= 0
        m_scored = m_entry
    b_score = tl.load(p_scores + i_row * width + o_entry, mask=m_scored, other=0.0)
    b_order = order_of(b_score, m_entry)  # [BLOCK]
    m_kept, b_place, kept = select_largest(b_order, m_entry, COUNT)
    p_tokens += tl.program_id(0).to(tl.int64) * COUNT
    tl.store(p_tokens + b_place, b_token, mask=m_kept)
    o_place = tl.arange(0, BLOCK_COUNT)
    tl.store(p_tokens + o_place, tl.full([BLOCK_COUNT], NO_TOKEN, tl.int32), mask=(o_place >= kept) & (o_place < COUNT))
    if not LAST:
        tl.store(p_kept + tl.program_id(0).to(tl.int64) * COUNT + b_place, score_of(b_order), mask=m_kept)


def forward(call: LightningIndexerCall, inputs: LightningIndexerInputs, config: Config) -> LightningIndexerOutputs:
    batch, queries, _, _ = call.query.shape
    tokens = call.key.shape[1]
    if not batch * queries * call.k:
        return LightningIndexerOutputs(jnp.zeros((batch, queries, call.k), jnp.int32))
    at_once = max(_NUMBERS // (batch * tokens), config.block_q)
    if queries <= at_once:
        return LightningIndexerOutputs(_selected(call, inputs, config))

    def tile(arrays):
        query, weights, ends = (jnp.moveaxis(one, 0, 1) for one in arrays)
        return jnp.moveaxis(_selected(call, inputs._replace(query=query, weights=weights, ends=ends), config), 1, 0)

    arrays = tuple(jnp.moveaxis(one, 1, 0) for one in (inputs.query, inputs.weights, inputs.ends))
    return LightningIndexerOutputs(jnp.moveaxis(over_rows(tile, arrays, at_once), 0, 1))


def _selected(call: LightningIndexerCall, inputs: LightningIndexerInputs, config: Config):
    """int32 `[b, t, k]`."""
    tokens = inputs.key.shape[1]
    if call.k == tokens:
        o_token = jnp.arange(tokens, dtype=jnp.int32)[None, None]
        return jnp.where(o_token < inputs.ends[..., None], o_token, NO_TOKEN)
    scores = _scores(call, inputs, config)
    if tokens > _SELECTED_AT_ONCE < 2 * call.k:  # a pass would not leave half as many
        return _sorted(call, inputs, scores)
    width, found = tokens, inputs.ends
    while True:
        block = min(_SELECTED_AT_ONCE, next_power_of_2(width))
        programs = -(-width // block)
        shape = (*inputs.ends.shape, programs * call.k)
        found, kept = call_kernel(
            select_tokens_kernel,
            (scores, found, inputs.ends, width, programs),
            ((shape, jnp.int32), (shape if programs > 1 else (1,), jnp.float32)),
            grid=inputs.ends.size * programs,
            num_warps=max(1, block // (32 * config.per_thread)),
            COUNT=call.k,
            FIRST=width == tokens,
            LAST=programs == 1,
            BLOCK=block,
            BLOCK_COUNT=next_power_of_2(call.k),
            NO_TOKEN=NO_TOKEN,
        )
        if programs == 1:
            return found
        width, scores = shape[2], kept


def _scores(call: LightningIndexerCall, inputs: LightningIndexerInputs, config: Config):
    """float32 `[b, t, s]`."""
    batch, queries, heads, size = inputs.query.shape
    tokens = inputs.key.shape[1]
    if not heads:
        return jnp.zeros((batch, queries, tokens), jnp.float32)
    key_scale = inputs.weights if inputs.key_scale is None else inputs.key_scale
    (scores,) = call_kernel(
        index_scores_kernel,
        (*inputs[:4], key_scale, queries, tokens),
        (((batch, queries, tokens), jnp.float32),),
        grid=batch * -(-queries // config.block_q) * -(-tokens // config.block_k),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        HEADS=heads,
        SIZE=size,
        BLOCK_H=heads_at_once(call),
        BLOCK_SIZE=channels_at_once(call),
        BLOCK_K=config.block_k,
        BLOCK_Q=config.block_q,
        COUNT=call.k,
        KEY_SCALE=inputs.key_scale is not None,
        PRECISION=dot_precision(None, call.query.dtype),
        STAGES=config.num_stages,
    )
    return scores


def _sorted(call: LightningIndexerCall, inputs: LightningIndexerInputs, scores):
    """As the second kernel's, by a sort."""
    tokens, ends = scores.shape[2], inputs.ends[..., None]
    o_token = jnp.arange(tokens, dtype=jnp.int32)[None, None]
    best, token = largest(jnp.where((o_token < ends) & (ends > call.k), scores, -jnp.inf), call.k)
    token = jnp.sort(jnp.where(best > -jnp.inf, token.astype(jnp.int32), tokens), axis=-1)
    token = jnp.where(token < tokens, token, NO_TOKEN)
    return jnp.where(ends > call.k, token, jnp.where(o_token[..., : call.k] < ends, o_token[..., : call.k], NO_TOKEN))
