"""One program computes a tile of tokens and channels; the shifted tiles that it reads overlap and come from the cache.

A first gradient kernel goes back through the activation and writes partial sums of the gradients of weight and bias, which XLA
adds up: no atomics. A second one makes the gradient of x of it. (To form the w activations that a token reaches again in one
kernel took twice as long: it is their exponentials and divisions that limit it.)
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.causal_conv1d.interface import CausalConv1dCall, CausalConv1dInputs, CausalConv1dOutputs
from ejkernel.operations.causal_conv1d.runs import Runs, last_inputs, runs_of
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.causal_conv1d.config import Config


@triton.jit
def load_tap(p_taps, o_channel, m_channel, TAP: tl.constexpr, CHANNELS: tl.constexpr):
    return tl.load(p_taps + TAP * CHANNELS + o_channel, mask=m_channel, other=0.0).to(tl.float32)


@triton.jit
def load_shifted(p_rows, i_token, o_channel, m_channel, length, SHIFT: tl.constexpr, CHANNELS: tl.constexpr):
    """Rows of the tokens `i_token + SHIFT`, 0 outside of the array."""
    i_row = i_token + SHIFT
    m_tile = ((i_row >= 0) & (i_row < length))[:, None] & m_channel[None, :]
    o_tile = i_row.to(tl.int64)[:, None] * CHANNELS + o_channel[None, :]
    return tl.load(p_rows + o_tile, mask=m_tile, other=0.0).to(tl.float32)


@triton.jit
def tokens_before(p_seen, i_token, length, SEGMENTED: tl.constexpr):
    """How many tokens of its own sequence each token has before it; -1 for those that take no part."""
    if SEGMENTED:
        return tl.load(p_seen + i_token, mask=(i_token >= 0) & (i_token < length), other=-1)
    return tl.where(i_token < length, i_token, -1)


@triton.jit
def causal_conv1d_forward_kernel(
    p_x,
    p_taps,
    p_bias,
    p_state,
    p_seen,
    p_owner,
    length,
    sequences,
    p_out,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED_FILTERS: tl.constexpr,
    SHARED_RUNS: tl.constexpr,
    SEGMENTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    SILU: tl.constexpr,
):
    COLUMNS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    tiles = tl.cdiv(length, TOKENS)
    i_batch = tl.program_id(0) // COLUMNS // tiles
    i_token = tl.program_id(0) // COLUMNS % tiles * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
    o_channel = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_channel = o_channel < CHANNELS
    o_runs = i_batch.to(tl.int64) * length if SEGMENTED and not SHARED_RUNS else 0
    i_filters = 0 if SHARED_FILTERS else i_batch
    p_rows = p_x + i_batch.to(tl.int64) * length * CHANNELS
    b_seen = tokens_before(p_seen + o_runs, i_token, length, SEGMENTED)  # [TOKENS]
    if HAS_STATE:
        b_owner = tl.zeros([TOKENS], tl.int32)
        if SEGMENTED:
            b_owner = tl.load(p_owner + o_runs + i_token, mask=i_token < length, other=-1)
    b_out = tl.zeros([TOKENS, BLOCK], tl.float32)
    if HAS_BIAS:
        b_out += tl.load(p_bias + i_filters * CHANNELS + o_channel, mask=m_channel, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(WIDTH):
        b_tap = load_tap(p_taps + i_filters * WIDTH * CHANNELS, o_channel, m_channel, WIDTH - 1 - back, CHANNELS)  # [BLOCK]
        b_x = load_shifted(p_rows, i_token, o_channel, m_channel, length, -back, CHANNELS)  # [TOKENS, BLOCK]
        b_out += tl.where((b_seen >= back)[:, None], b_x, 0.0) * b_tap[None, :]
        if HAS_STATE and back > 0:
            m_state = (b_seen >= 0) & (b_seen < back) & (b_owner >= 0)
            i_row = (i_batch * sequences + b_owner).to(tl.int64) * (WIDTH - 1) + (WIDTH - 1 - back) + b_seen
            m_tile = m_state[:, None] & m_channel[None, :]
            b_state = tl.load(p_state + i_row[:, None] * CHANNELS + o_channel[None, :], mask=m_tile, other=0.0)
            b_out += b_state.to(tl.float32) * b_tap[None, :]
    if SILU:
        b_out = b_out * tl.sigmoid(b_out)
    b_out = tl.where((b_seen >= 0)[:, None], b_out, 0.0)
    o_out = i_token.to(tl.int64)[:, None] * CHANNELS + o_channel[None, :]
    m_out = (i_token < length)[:, None] & m_channel[None, :]
    p_result = p_out + i_batch.to(tl.int64) * length * CHANNELS
    tl.store(p_result + o_out, b_out.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def causal_conv1d_filters_kernel(
    p_x,
    p_taps,
    p_bias,
    p_grad,
    p_seen,
    length,
    p_dlinear,
    p_dfilters,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARED_FILTERS: tl.constexpr,
    SHARED_RUNS: tl.constexpr,
    SEGMENTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """The gradient before the activation, where there is one, and `p_dfilters [b, chunks, w + 1, c]`: partial sums of the taps'
    gradients, and of the bias' in the last row. Each pass over the chunk adds up one of them; all but the first find it cached."""
    COLUMNS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    chunks = tl.cdiv(length, CHUNK)
    i_batch = tl.program_id(0) // COLUMNS // chunks
    i_chunk = tl.program_id(0) // COLUMNS % chunks
    o_channel = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_channel = o_channel < CHANNELS
    o_runs = i_batch.to(tl.int64) * length if SEGMENTED and not SHARED_RUNS else 0
    i_filters = 0 if SHARED_FILTERS else i_batch
    o_rows = i_batch.to(tl.int64) * length * CHANNELS
    o_sums = (i_batch * chunks + i_chunk).to(tl.int64) * (WIDTH + 1) * CHANNELS + o_channel
    if SILU or HAS_BIAS:
        b_sum = tl.zeros([TOKENS, BLOCK], tl.float32)
        for i_step in range(0, CHUNK, TOKENS):
            i_token = i_chunk * CHUNK + i_step + tl.arange(0, TOKENS)  # [TOKENS]
            b_seen = tokens_before(p_seen + o_runs, i_token, length, SEGMENTED)  # [TOKENS]
            b_grad = load_shifted(p_grad + o_rows, i_token, o_channel, m_channel, length, 0, CHANNELS)  # [TOKENS, BLOCK]
            b_grad = tl.where((b_seen >= 0)[:, None], b_grad, 0.0)
            if SILU:
                b_linear = tl.zeros([TOKENS, BLOCK], tl.float32)
                if HAS_BIAS:
                    b_bias = tl.load(p_bias + i_filters * CHANNELS + o_channel, mask=m_channel, other=0.0)
                    b_linear += b_bias.to(tl.float32)[None, :]
                for back in tl.static_range(WIDTH):
                    b_tap = load_tap(p_taps + i_filters * WIDTH * CHANNELS, o_channel, m_channel, WIDTH - 1 - back, CHANNELS)
                    b_x = load_shifted(p_x + o_rows, i_token, o_channel, m_channel, length, -back, CHANNELS)
                    b_linear += tl.where((b_seen >= back)[:, None], b_x, 0.0) * b_tap[None, :]
                b_gate = tl.sigmoid(b_linear)
                b_grad = b_grad * (b_gate * (1 + b_linear * (1 - b_gate)))
                o_tile = i_token.to(tl.int64)[:, None] * CHANNELS + o_channel[None, :]
                m_tile = (i_token < length)[:, None] & m_channel[None, :]
                tl.store(p_dlinear + o_rows + o_tile, b_grad.to(p_dlinear.dtype.element_ty), mask=m_tile)
            b_sum += b_grad
        if HAS_BIAS:
            tl.store(p_dfilters + o_sums + WIDTH * CHANNELS, tl.sum(b_sum, axis=0), mask=m_channel)
        tl.debug_barrier()
    p_linear = p_dlinear if SILU else p_grad
    for back in tl.static_range(WIDTH):
        b_sum = tl.zeros([TOKENS, BLOCK], tl.float32)
        for i_step in range(0, CHUNK, TOKENS):
            i_token = i_chunk * CHUNK + i_step + tl.arange(0, TOKENS)  # [TOKENS]
            b_seen = tokens_before(p_seen + o_runs, i_token, length, SEGMENTED)  # [TOKENS]
            b_grad = load_shifted(p_linear + o_rows, i_token, o_channel, m_channel, length, 0, CHANNELS)
            b_x = load_shifted(p_x + o_rows, i_token, o_channel, m_channel, length, -back, CHANNELS)
            b_sum += tl.where((b_seen >= back)[:, None], b_x * b_grad, 0.0)
        tl.store(p_dfilters + o_sums + (WIDTH - 1 - back) * CHANNELS, tl.sum(b_sum, axis=0), mask=m_channel)


@triton.jit
def causal_conv1d_backward_kernel(
    p_taps,
    p_dlinear,
    p_seen,
    length,
    p_dx,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED_FILTERS: tl.constexpr,
    SHARED_RUNS: tl.constexpr,
    SEGMENTED: tl.constexpr,
):
    """The gradient of x from that before the activation, of each token and the w - 1 after it."""
    COLUMNS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    tiles = tl.cdiv(length, TOKENS)
    i_batch = tl.program_id(0) // COLUMNS // tiles
    i_token = tl.program_id(0) // COLUMNS % tiles * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
    o_channel = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_channel = o_channel < CHANNELS
    o_runs = i_batch.to(tl.int64) * length if SEGMENTED and not SHARED_RUNS else 0
    i_filters = 0 if SHARED_FILTERS else i_batch
    o_rows = i_batch.to(tl.int64) * length * CHANNELS
    b_dx = tl.zeros([TOKENS, BLOCK], tl.float32)
    for ahead in tl.static_range(WIDTH):
        b_seen = tokens_before(p_seen + o_runs, i_token + ahead, length, SEGMENTED)  # [TOKENS]
        b_tap = load_tap(p_taps + i_filters * WIDTH * CHANNELS, o_channel, m_channel, WIDTH - 1 - ahead, CHANNELS)
        b_grad = load_shifted(p_dlinear + o_rows, i_token, o_channel, m_channel, length, ahead, CHANNELS)
        b_dx += tl.where((b_seen >= ahead)[:, None], b_grad, 0.0) * b_tap[None, :]
    o_dx = i_token.to(tl.int64)[:, None] * CHANNELS + o_channel[None, :]
    m_dx = (i_token < length)[:, None] & m_channel[None, :]
    tl.store(p_dx + o_rows + o_dx, b_dx.to(p_dx.dtype.element_ty), mask=m_dx)


def _constants(call: CausalConv1dCall, taps: Any, runs: Runs | None, config: Config) -> dict[str, Any]:
    return {
        "CHANNELS": call.x.shape[2],
        "WIDTH": call.width,
        "TOKENS": config.tokens,
        "BLOCK": config.block,
        "SHARED_FILTERS": taps.shape[0] == 1,
        "SHARED_RUNS": runs is None or runs.seen.shape[0] == 1,
        "SEGMENTED": runs is not None,
        "num_warps": config.num_warps,
    }


def _linear_part(call: CausalConv1dCall) -> dict[str, bool]:
    return {"HAS_BIAS": call.bias is not None, "SILU": call.activation == "silu"}


def _filters(call: CausalConv1dCall, inputs: CausalConv1dInputs) -> tuple[Any, Any]:
    """Weight as `[1 or b, w, c]`, and bias with the same batch axis; an absent one is replaced by the weight."""
    taps, bias = jnp.swapaxes(inputs.weight, 1, 2), inputs.bias
    if bias is not None and bias.shape[0] != taps.shape[0]:
        batch = call.x.shape[0]
        taps = jnp.broadcast_to(taps, (batch, *taps.shape[1:]))
        bias = jnp.broadcast_to(bias, (batch, *bias.shape[1:]))
    return taps, taps if bias is None else bias


def _tiles(call: CausalConv1dCall, config: Config) -> tuple[int, int]:
    """How many tiles of tokens and of channels one member of the batch has."""
    _, length, channels = call.x.shape
    return -(-length // config.tokens), -(-channels // config.block)


def forward(call: CausalConv1dCall, inputs: CausalConv1dInputs, config: Config) -> CausalConv1dOutputs:
    x, state = inputs.x, inputs.initial_state
    runs = runs_of(call, inputs)
    final = last_inputs(call, x, state, runs) if call.return_state else None
    if not x.size:
        return CausalConv1dOutputs(jnp.zeros_like(x), final)
    taps, bias = _filters(call, inputs)
    has_state = state is not None and call.sequences > 0
    tiles, columns = _tiles(call, config)
    (out,) = call_kernel(
        causal_conv1d_forward_kernel,
        (
            x,
            taps,
            bias,
            state if has_state else taps,
            taps if runs is None else runs.seen,
            taps if runs is None else runs.owner,
            x.shape[1],
            call.sequences,
        ),
        ((x.shape, x.dtype),),
        grid=x.shape[0] * tiles * columns,
        HAS_STATE=has_state,
        **_linear_part(call),
        **_constants(call, taps, runs, config),
    )
    return CausalConv1dOutputs(out, final)


def backward(
    call: CausalConv1dCall,
    inputs: CausalConv1dInputs,
    outputs: CausalConv1dOutputs,
    cotangents: CausalConv1dOutputs,
    config: Config,
) -> CausalConv1dInputs:
    x, given = inputs.x, inputs.bias
    if not x.size:
        return CausalConv1dInputs(
            jnp.zeros_like(x), jnp.zeros_like(inputs.weight), None if given is None else jnp.zeros_like(given)
        )
    runs = runs_of(call, inputs)
    taps, bias = _filters(call, inputs)
    tiles, columns = _tiles(call, config)
    seen = taps if runs is None else runs.seen
    constants, activated = _constants(call, taps, runs, config), call.activation is not None
    chunks = -(-x.shape[1] // config.chunk_size)
    d_linear, partial = call_kernel(
        causal_conv1d_filters_kernel,
        (x, taps, bias, cotangents.out, seen, x.shape[1]),
        (
            (x.shape if activated else (1,), x.dtype),
            ((x.shape[0], chunks, call.width + 1, x.shape[2]), jnp.float32),
        ),
        grid=x.shape[0] * chunks * columns,
        CHUNK=config.chunk_size,
        **_linear_part(call),
        **constants,
    )
    (d_x,) = call_kernel(
        causal_conv1d_backward_kernel,
        (taps, d_linear if activated else cotangents.out, seen, x.shape[1]),
        ((x.shape, x.dtype),),
        grid=x.shape[0] * tiles * columns,
        **constants,
    )

    def total(rows: Any, like: Any) -> Any:
        return jnp.sum(rows, axis=(0, 1) if like.shape[0] == 1 else 1).reshape(like.shape[0], *rows.shape[2:])

    d_weight = jnp.swapaxes(total(partial[:, :, : call.width], inputs.weight), 1, 2)
    d_bias = None if given is None else total(partial[:, :, call.width], given).astype(given.dtype)
    return CausalConv1dInputs(d_x, d_weight.astype(inputs.weight.dtype), d_bias)
