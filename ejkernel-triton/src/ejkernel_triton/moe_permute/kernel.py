"""A counting sort of the copies' experts, stable and without atomics, then one move of the rows.

Programs count the copies of their chunk for each expert. Then each adds up the counts of the chunks before its own, which says
where its first copy for each expert goes, and ranks its copies by a running sum over their one-hot rows.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.moe_permute.interface import MoePermuteCall, MoePermuteInputs, MoePermuteOutputs
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._copies.config import Config
from ejkernel_triton._copies.kernel import collect, spread
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._rows.config import warps_for
from ejkernel_triton.moe_permute.config import ForwardConfig

_TILE = 4096
"""Elements of a tile of copies and experts."""


@triton.jit
def moe_count_kernel(
    p_experts,
    copies,
    chunks,
    p_counts,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """`counts [b, chunks, e]`."""
    i_batch = tl.program_id(0) // chunks
    i_first = tl.program_id(0) % chunks * CHUNK
    o_expert = tl.arange(0, BLOCK)  # [BLOCK]
    p_member = p_experts + i_batch.to(tl.int64) * copies
    b_counts = tl.zeros([BLOCK], tl.int32)
    for i_step in range(0, CHUNK, STEP):
        i_copy = i_first + i_step + tl.arange(0, STEP)  # [STEP]
        b_experts = tl.load(p_member + i_copy, mask=i_copy < copies, other=-1)  # [STEP]
        b_counts += tl.sum((b_experts[:, None] == o_expert[None, :]).to(tl.int32), axis=0)
    tl.store(p_counts + tl.program_id(0).to(tl.int64) * EXPERTS + o_expert, b_counts, mask=o_expert < EXPERTS)


@triton.jit
def moe_place_kernel(
    p_experts,
    p_counts,
    copies,
    chunks,
    p_positions,
    p_sizes,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_batch, i_chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    o_expert = tl.arange(0, BLOCK)  # [BLOCK]
    m_expert = o_expert < EXPERTS
    p_member = p_counts + (i_batch * chunks).to(tl.int64) * EXPERTS
    b_total = tl.zeros([BLOCK], tl.int32)
    b_before = tl.zeros([BLOCK], tl.int32)
    for i_step in range(0, chunks, STEP):
        i_other = i_step + tl.arange(0, STEP)  # [STEP]
        o_counts = i_other.to(tl.int64)[:, None] * EXPERTS + o_expert[None, :]
        b_counts = tl.load(p_member + o_counts, mask=(i_other < chunks)[:, None] & m_expert[None, :], other=0)  # [STEP, BLOCK]
        b_total += tl.sum(b_counts, axis=0)
        b_before += tl.sum(tl.where((i_other < i_chunk)[:, None], b_counts, 0), axis=0)
    tl.store(p_sizes + i_batch * EXPERTS + o_expert, b_total, mask=m_expert & (i_chunk == 0))
    b_next = tl.cumsum(b_total, axis=0) - b_total + b_before  # [BLOCK], where the next copy for each expert goes
    i_spare = tl.sum(b_total, axis=0) + i_chunk * CHUNK - tl.sum(b_before, axis=0)  # where the next copy of no group goes
    p_rows = i_batch.to(tl.int64) * copies
    for i_step in range(0, CHUNK, STEP):
        i_copy = i_chunk * CHUNK + i_step + tl.arange(0, STEP)  # [STEP]
        b_experts = tl.load(p_experts + p_rows + i_copy, mask=i_copy < copies, other=-1)  # [STEP]
        b_held = (b_experts >= 0) & (b_experts < EXPERTS)
        b_chosen = ((b_experts[:, None] == o_expert[None, :]) & b_held[:, None]).to(tl.int32)  # [STEP, BLOCK]
        b_rank = tl.cumsum(b_chosen, axis=0) - b_chosen + b_next[None, :]
        b_row = tl.sum(b_chosen * b_rank, axis=1)  # [STEP]
        b_spare = (~b_held & (i_copy < copies)).to(tl.int32)
        b_last = i_spare + tl.cumsum(b_spare, axis=0) - b_spare
        tl.store(p_positions + p_rows + i_copy, tl.where(b_held, b_row, -1 - b_last), mask=i_copy < copies)
        b_next += tl.sum(b_chosen, axis=0)
        i_spare += tl.sum(b_spare, axis=0)


def _positions(call: MoePermuteCall, experts: Any, config: ForwardConfig) -> tuple[Any, Any]:
    """group_sizes `[b, e]` and positions `[b, t, k]`."""
    batch, copies, count = experts.shape[0], call.rows, call.num_experts
    block = next_power_of_2(count)
    step = min(config.chunk, max(16, _TILE // block))
    chunks = -(-copies // config.chunk)
    launch = {
        "grid": batch * chunks,
        "EXPERTS": count,
        "BLOCK": block,
        "STEP": step,
        "CHUNK": config.chunk,
        "num_warps": max(4, warps_for(step * block, 16)),
    }
    (counts,) = call_kernel(moe_count_kernel, (experts, copies, chunks), (((batch, chunks, count), jnp.int32),), **launch)
    positions, sizes = call_kernel(
        moe_place_kernel,
        (experts, counts, copies, chunks),
        ((experts.shape, jnp.int32), ((batch, count), jnp.int32)),
        **launch,
    )
    return sizes, positions


def forward(call: MoePermuteCall, inputs: MoePermuteInputs, config: ForwardConfig) -> MoePermuteOutputs:
    x, experts = inputs
    if experts.size:
        sizes, positions = _positions(call, experts, config)
    else:
        sizes, positions = jnp.zeros((x.shape[0], call.num_experts), jnp.int32), experts
    return MoePermuteOutputs(spread(x, positions, None, config), sizes, positions)


def backward(
    call: MoePermuteCall, inputs: MoePermuteInputs, outputs: MoePermuteOutputs, cotangents: MoePermuteOutputs, config: Config
) -> MoePermuteInputs:
    return MoePermuteInputs(collect(cotangents.rows, outputs.positions, None, config), None)
