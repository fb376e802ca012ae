"""Scores of a tile of blocks for a tile of queries of one key head, then the largest of each query's.

The weights of the query heads are summed in registers and written once, in float32, and only those of some queries are held. A
program of the second kernel has all scores of a query and key head in its registers.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false
import math

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.common.ranking import over_rows
from ejkernel.operations.common.selected import NOTHING
from ejkernel.operations.native_sparse_selection.interface import (
    LARGEST,
    NativeSparseSelectionCall,
    NativeSparseSelectionInputs,
    NativeSparseSelectionOutputs,
)
from ejkernel_triton._blocks import dot_block, next_power_of_2
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._numerics import dot_precision
from ejkernel_triton._ranking import order_of, select_largest
from ejkernel_triton._stored import load_rows
from ejkernel_triton.native_sparse_selection.config import Config

_NUMBERS = 2**27
"""Scores that are held at once: 512 MiB."""
_FORCED = 3
"""The own block, the one before it and the first are selected whatever their scores are."""
_LOG2_E = tl.constexpr(math.log2(math.e))
_LARGEST = tl.constexpr(LARGEST)


@triton.jit
def block_scores_kernel(
    p_query,
    p_means,
    p_lse,
    p_own,
    p_first,
    queries,
    entries,
    p_scores,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ENOUGH: tl.constexpr,
    FIRST: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles without a score that decides are not written; a query with at most ENOUGH blocks needs none."""
    DTYPE: tl.constexpr = p_query.dtype.element_ty
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    entry_tiles = tl.cdiv(entries, BLOCK_N)
    query_tiles = tl.cdiv(queries, BLOCK_Q)
    i_entry = tl.program_id(0) % entry_tiles * BLOCK_N
    i_rest = tl.program_id(0) // entry_tiles
    i_key_head = i_rest % KEY_HEADS
    i_rest = i_rest // KEY_HEADS
    i_batch = (i_rest // query_tiles).to(tl.int64)
    i_query = (query_tiles - 1 - i_rest % query_tiles) * BLOCK_Q  # those that see most begin first
    o_query = tl.arange(0, BLOCK_Q)
    m_query = i_query + o_query < queries
    i_row = i_batch * queries + i_query

    b_own = tl.load(p_own + i_row + o_query, mask=m_query, other=-1)  # [BLOCK_Q]
    m_scored = b_own >= ENOUGH
    b_first = b_own * 0
    if FIRST:
        b_first = tl.load(p_first + i_row + o_query, mask=m_query, other=0)
    low = tl.min(tl.where(m_scored, b_first + 1, entries), axis=0)
    high = tl.max(tl.where(m_scored, b_first + b_own - 1, 0), axis=0)
    if (i_entry < high) & (i_entry + BLOCK_N > low):
        o_entry = tl.arange(0, BLOCK_N)
        m_entry = i_entry + o_entry < entries
        p_means += ((i_batch * entries + i_entry) * KEY_HEADS + i_key_head) * SIZE
        b_means = load_rows(p_means, o_entry * (KEY_HEADS * SIZE), m_entry, SIZE, BLOCK_SIZE, DTYPE)  # [BLOCK_N, BLOCK_SIZE]
        i_head = i_row * HEADS + i_key_head * GROUP
        p_query += i_head * SIZE
        p_lse += i_head
        b_sum = tl.zeros([BLOCK_Q, BLOCK_N], tl.float32)
        for i_member in tl.range(0, GROUP, num_stages=STAGES):
            o_head = o_query * HEADS + i_member
            b_query = load_rows(p_query, o_head * SIZE, m_query, SIZE, BLOCK_SIZE, DTYPE)  # [BLOCK_Q, BLOCK_SIZE]
            b_lse = tl.load(p_lse + o_head, mask=m_query, other=0.0) * _LOG2_E
            b_product = tl.dot(b_query, tl.trans(b_means), input_precision=PRECISION)  # [BLOCK_Q, BLOCK_N]
            b_exponent = b_product * (SCALE * _LOG2_E) - b_lse[:, None]
            # Not `weight >= 0`: ptxas takes it to be true of what exp2 gives, which may be NaN.
            b_sum += tl.where(b_exponent == b_exponent, tl.exp2(b_exponent), 0.0)
        p_scores += (i_row * KEY_HEADS + i_key_head) * entries + i_entry
        o_score = (o_query * (KEY_HEADS * entries))[:, None] + o_entry[None, :]
        tl.store(p_scores + o_score, tl.minimum(b_sum, _LARGEST), mask=m_query[:, None] & m_entry[None, :])


@triton.jit
def select_blocks_kernel(
    p_scores,
    p_own,
    p_first,
    p_counts,
    entries,
    p_blocks,
    KEY_HEADS: tl.constexpr,
    COUNT: tl.constexpr,
    ENOUGH: tl.constexpr,
    FIRST: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    NOTHING: tl.constexpr,
):
    """The blocks of one query and key head, in ascending order."""
    i_row = tl.program_id(0).to(tl.int64)
    own = tl.load(p_own + i_row // KEY_HEADS)
    first = own * 0
    if FIRST:
        first = tl.load(p_first + i_row // KEY_HEADS)
    count = COUNT
    if COUNTED:
        count = tl.load(p_counts + i_row)
    o_block = tl.arange(0, BLOCK)
    m_block = (o_block <= own) & (o_block < entries - first)
    m_scored = m_block & (o_block > 0) & (o_block < own - 1) & (own >= ENOUGH)
    b_score = tl.load(p_scores + i_row * entries + first + o_block, mask=m_scored, other=0.0)  # [BLOCK]
    b_score = tl.where(o_block == 0, 2 * _LARGEST, b_score)
    b_score = tl.where(o_block == own - 1, 4 * _LARGEST, b_score)
    b_score = tl.where(o_block == own, 8 * _LARGEST, b_score)
    m_kept, b_place, kept = select_largest(order_of(b_score, m_block), m_block, count)
    p_blocks += i_row * COUNT
    tl.store(p_blocks + b_place, o_block, mask=m_kept)
    o_place = tl.arange(0, BLOCK_COUNT)
    tl.store(p_blocks + o_place, tl.full([BLOCK_COUNT], NOTHING, tl.int32), mask=(o_place >= kept) & (o_place < COUNT))


def forward(
    call: NativeSparseSelectionCall, inputs: NativeSparseSelectionInputs, config: Config
) -> NativeSparseSelectionOutputs:
    batch, length, _, _ = call.query.shape
    entries, key_heads = call.means.shape[1:3]
    if not batch * length * call.count:
        return NativeSparseSelectionOutputs(jnp.zeros((batch, length, key_heads, call.count), jnp.int32))
    own, first = (x if x is None else jnp.broadcast_to(x, (batch, length)) for x in (inputs.own_blocks, inputs.first_blocks))
    inputs = inputs._replace(own_blocks=own, first_blocks=first)
    at_once = max(_NUMBERS // (batch * key_heads * entries), config.block_q)
    if length <= at_once:
        return NativeSparseSelectionOutputs(_selected(call, inputs, config))

    def tile(arrays):
        return jnp.moveaxis(_selected(call, NativeSparseSelectionInputs(means=inputs.means, **_turned(arrays)), config), 1, 0)

    arrays = {name: x for name, x in inputs._asdict().items() if name != "means"}
    return NativeSparseSelectionOutputs(jnp.moveaxis(over_rows(tile, _turned(arrays), at_once), 0, 1))


def _turned(arrays):
    """With batch and queries exchanged."""
    return {name: x if x is None else jnp.swapaxes(x, 0, 1) for name, x in arrays.items()}


def _selected(call: NativeSparseSelectionCall, inputs: NativeSparseSelectionInputs, config: Config):
    """int32 `[b, t, k, c]`."""
    batch, queries, _, _ = inputs.query.shape
    entries, key_heads = inputs.means.shape[1:3]
    first = inputs.own_blocks if inputs.first_blocks is None else inputs.first_blocks
    counts = inputs.own_blocks if inputs.block_counts is None else inputs.block_counts
    enough = max(_FORCED, 0 if inputs.block_counts is not None else call.count)
    options = {"KEY_HEADS": key_heads, "ENOUGH": enough, "FIRST": inputs.first_blocks is not None}
    (blocks,) = call_kernel(
        select_blocks_kernel,
        (_scores(call, inputs, first, config, options), inputs.own_blocks, first, counts, entries),
        (((batch, queries, key_heads, call.count), jnp.int32),),
        grid=batch * queries * key_heads,
        num_warps=max(1, next_power_of_2(entries) // (32 * config.per_thread)),
        COUNT=call.count,
        COUNTED=inputs.block_counts is not None,
        BLOCK=next_power_of_2(entries),
        BLOCK_COUNT=next_power_of_2(call.count),
        NOTHING=NOTHING,
        **options,
    )
    return blocks


def _scores(call: NativeSparseSelectionCall, inputs: NativeSparseSelectionInputs, first, config: Config, options):
    """float32 `[b, t, k, n]`; some array if no query has more blocks than it selects."""
    batch, queries, heads, size = inputs.query.shape
    entries, key_heads = inputs.means.shape[1:3]
    if entries <= options["ENOUGH"] or not heads:
        return inputs.lse
    (scores,) = call_kernel(
        block_scores_kernel,
        (*inputs[:3], inputs.own_blocks, first, queries, entries),
        (((batch, queries, key_heads, entries), jnp.float32),),
        grid=batch * key_heads * -(-queries // config.block_q) * -(-entries // config.block_n),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        HEADS=heads,
        SIZE=size,
        BLOCK_SIZE=dot_block(size),
        BLOCK_Q=config.block_q,
        BLOCK_N=config.block_n,
        SCALE=call.softmax_scale,
        PRECISION=dot_precision(None, call.query.dtype),
        STAGES=config.num_stages,
        **options,
    )
    return scores
