"""Mean over rows of the batch or packed sequences, split into chunks of tokens so that long sequences fill the device.

A chunk lies within one sequence. XLA computes the table of chunks from `cu_seqlens`; its length depends on shapes only. Every
chunk writes a partial sum; a second kernel combines those of a sequence in order, without atomics. Without `cu_seqlens` each
row of the batch is one sequence.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
import math
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.mean_pooling.interface import MeanPoolingCall, MeanPoolingInputs, MeanPoolingOutputs
from ejkernel_triton._chunks import Chunks, chunks_of
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.mean_pooling.config import Config, channels


@triton.jit
def chunk_of(p_bounds, p_first, p_sequence, i_batch, i_chunk, chunks, sequences, SHARED: tl.constexpr, CHUNK: tl.constexpr):
    """Sequence of a chunk and its token range, which is empty for an unused chunk."""
    i_member = 0 if SHARED else i_batch
    i_sequence = tl.load(p_sequence + i_member * chunks + i_chunk)
    o_bounds = i_member * (sequences + 1) + tl.minimum(i_sequence, sequences - 1)
    i_end = tl.load(p_bounds + o_bounds + 1)
    i_begin = tl.load(p_bounds + o_bounds) + (i_chunk - tl.load(p_first + o_bounds)) * CHUNK
    return i_sequence, i_begin, tl.where(i_sequence < sequences, tl.minimum(i_end, i_begin + CHUNK), i_begin)


@triton.jit
def pooling_partial_sums_kernel(
    p_x,
    p_bounds,
    p_first,
    p_sequence,
    length,
    chunks,
    sequences,
    p_partial,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARED: tl.constexpr,
    STAGES: tl.constexpr,
):
    COLUMNS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    i_chunk = tl.program_id(0) // COLUMNS % chunks
    i_batch = tl.program_id(0) // COLUMNS // chunks
    o_channel = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_channel = o_channel < CHANNELS
    _, i_begin, i_end = chunk_of(p_bounds, p_first, p_sequence, i_batch, i_chunk, chunks, sequences, SHARED, CHUNK)
    p_row = p_x + i_batch.to(tl.int64) * length * CHANNELS
    b_sum = tl.zeros([TOKENS, BLOCK], tl.float32)
    for i_step in tl.range(0, tl.cdiv(i_end - i_begin, TOKENS), num_stages=STAGES):
        i_token = i_begin + i_step * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
        m_tile = (i_token < i_end)[:, None] & m_channel[None, :]
        o_tile = i_token.to(tl.int64)[:, None] * CHANNELS + o_channel[None, :]
        b_sum += tl.load(p_row + o_tile, mask=m_tile, other=0.0).to(tl.float32)  # [TOKENS, BLOCK]
    o_partial = (i_batch * chunks + i_chunk).to(tl.int64) * CHANNELS
    tl.store(p_partial + o_partial + o_channel, tl.sum(b_sum, axis=0), mask=m_channel)


@triton.jit
def pooling_means_kernel(
    p_partial,
    p_bounds,
    p_first,
    chunks,
    sequences,
    p_out,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Sums eight chunks at a time, in a fixed order."""
    COLUMNS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    i_sequence = tl.program_id(0) // COLUMNS % sequences
    i_batch = tl.program_id(0) // COLUMNS // sequences
    o_channel = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_channel = o_channel < CHANNELS
    o_bounds = (0 if SHARED else i_batch) * (sequences + 1) + i_sequence
    i_first, i_last = tl.load(p_first + o_bounds), tl.load(p_first + o_bounds + 1)
    length = tl.load(p_bounds + o_bounds + 1) - tl.load(p_bounds + o_bounds)
    b_sum = tl.zeros([8, BLOCK], tl.float32)
    for i_step in tl.range(i_first, i_last, 8):
        i_chunk = i_step + tl.arange(0, 8)
        o_partial = (i_batch * chunks + i_chunk).to(tl.int64)[:, None] * CHANNELS + o_channel[None, :]
        b_sum += tl.load(p_partial + o_partial, mask=(i_chunk < i_last)[:, None] & m_channel[None, :], other=0.0)
    b_out = tl.sum(b_sum, axis=0) / tl.maximum(length, 1).to(tl.float32)  # [BLOCK]
    o_out = (i_batch * sequences + i_sequence).to(tl.int64) * CHANNELS + o_channel
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_channel)


@triton.jit
def pooling_backward_kernel(
    p_grad,
    p_bounds,
    p_first,
    p_sequence,
    length,
    chunks,
    sequences,
    p_dx,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Two sequences are added to those of the call: the tokens before and after, whose gradient is 0."""
    COLUMNS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    i_chunk = tl.program_id(0) // COLUMNS % chunks
    i_batch = tl.program_id(0) // COLUMNS // chunks
    o_channel = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_channel = o_channel < CHANNELS
    i_sequence, i_begin, i_end = chunk_of(p_bounds, p_first, p_sequence, i_batch, i_chunk, chunks, sequences, SHARED, CHUNK)
    o_bounds = (0 if SHARED else i_batch) * (sequences + 1) + tl.minimum(i_sequence, sequences - 1)
    tokens = tl.load(p_bounds + o_bounds + 1) - tl.load(p_bounds + o_bounds)
    m_pooled = (i_sequence > 0) & (i_sequence < sequences - 1)
    o_grad = (i_batch * (sequences - 2) + i_sequence - 1).to(tl.int64) * CHANNELS + o_channel
    b_grad = tl.load(p_grad + o_grad, mask=m_channel & m_pooled, other=0.0).to(tl.float32)  # [BLOCK]
    b_grad = (b_grad / tl.maximum(tokens, 1).to(tl.float32)).to(p_dx.dtype.element_ty)
    p_row = p_dx + i_batch.to(tl.int64) * length * CHANNELS
    for i_step in tl.range(0, tl.cdiv(i_end - i_begin, TOKENS), num_stages=STAGES):
        i_token = i_begin + i_step * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
        m_tile = (i_token < i_end)[:, None] & m_channel[None, :]
        o_tile = i_token.to(tl.int64)[:, None] * CHANNELS + o_channel[None, :]
        tl.store(p_row + o_tile, tl.broadcast_to(b_grad[None, :], [TOKENS, BLOCK]), mask=m_tile)


def _bounds(call: MeanPoolingCall, cu_seqlens: Any) -> Any:
    """`[1 or b, n + 1]`."""
    return call.x.shape[1] * jnp.arange(2, dtype=jnp.int32)[None] if cu_seqlens is None else cu_seqlens


def _constants(call: MeanPoolingCall, chunks: Chunks, config: Config) -> dict[str, Any]:
    return {
        "CHANNELS": channels(call),
        "BLOCK": config.block,
        "SHARED": chunks.bounds.shape[0] == 1,
        "num_warps": config.num_warps,
    }


def _steps(config: Config) -> dict[str, int]:
    return {"TOKENS": config.tokens, "CHUNK": config.chunk_size, "STAGES": config.num_stages}


def forward(call: MeanPoolingCall, inputs: MeanPoolingInputs, config: Config) -> MeanPoolingOutputs:
    x = inputs.x
    batch, length = x.shape[:2]
    shape = (batch, call.sequences, *x.shape[2:])
    if not x.size or not math.prod(shape):
        return MeanPoolingOutputs(jnp.zeros(shape, x.dtype))
    chunks = chunks_of(_bounds(call, inputs.cu_seqlens), length, config.chunk_size)
    constants = _constants(call, chunks, config)
    columns = -(-channels(call) // config.block)
    (partial,) = call_kernel(
        pooling_partial_sums_kernel,
        (x, *chunks, length, *chunks.counts),
        (((batch, chunks.counts[0], channels(call)), jnp.float32),),
        grid=batch * chunks.counts[0] * columns,
        **_steps(config),
        **constants,
    )
    (out,) = call_kernel(
        pooling_means_kernel,
        (partial, chunks.bounds, chunks.first, *chunks.counts),
        ((shape, x.dtype),),
        grid=batch * call.sequences * columns,
        **constants,
    )
    return MeanPoolingOutputs(out)


def backward(
    call: MeanPoolingCall,
    inputs: MeanPoolingInputs,
    outputs: MeanPoolingOutputs,
    cotangents: MeanPoolingOutputs,
    config: Config,
) -> MeanPoolingInputs:
    x, grad = inputs.x, cotangents.out
    batch, length = x.shape[:2]
    if not x.size or not grad.size:
        return MeanPoolingInputs(jnp.zeros_like(x))
    bounds = jnp.pad(_bounds(call, inputs.cu_seqlens), ((0, 0), (1, 0)))
    bounds = jnp.pad(bounds, ((0, 0), (0, 1)), constant_values=length)
    chunks = chunks_of(bounds, length, config.chunk_size)
    (d_x,) = call_kernel(
        pooling_backward_kernel,
        (grad, *chunks, length, *chunks.counts),
        ((x.shape, x.dtype),),
        grid=batch * chunks.counts[0] * -(-channels(call) // config.block),
        **_steps(config),
        **_constants(call, chunks, config),
    )
    return MeanPoolingInputs(d_x)
