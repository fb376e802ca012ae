"""The two moves: a token's row to its k places, and its k rows back into one sum.

One program has one token, so that a scattered row is read once and written k times, and no two programs write to the same place:
a position names one row, and with `~row` also that of a copy without part, which gets 0.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel_triton._copies.config import Config
from ejkernel_triton._jax_triton import call_kernel


@triton.jit
def copies_spread_kernel(
    p_x,
    p_positions,
    p_weights,
    tokens,
    p_rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOICES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SHARED_POSITIONS: tl.constexpr,
    SHARED_WEIGHTS: tl.constexpr,
):
    """`rows[positions[t, j]] = weights[t, j] * x[t]`."""
    COLUMNS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    i_token = tl.program_id(0) // COLUMNS  # of the whole batch
    i_batch = i_token // tokens
    o_channel = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_channel = o_channel < WIDTH
    b_x = tl.load(p_x + i_token.to(tl.int64) * WIDTH + o_channel, mask=m_channel, other=0.0)  # [BLOCK]
    o_positions = (i_token % tokens if SHARED_POSITIONS else i_token).to(tl.int64) * CHOICES
    o_weights = (i_token % tokens if SHARED_WEIGHTS else i_token).to(tl.int64) * CHOICES
    p_member = p_rows + i_batch.to(tl.int64) * tokens * CHOICES * WIDTH
    for choice in tl.static_range(CHOICES):
        i_row = tl.load(p_positions + o_positions + choice)
        taken = i_row >= 0
        i_row = tl.where(taken, i_row, -1 - i_row)
        b_row = b_x.to(tl.float32)
        if WEIGHTED:
            b_row = b_row * tl.load(p_weights + o_weights + choice).to(tl.float32)
        b_row = tl.where(taken, b_row, 0.0).to(p_rows.dtype.element_ty)
        m_row = m_channel & (i_row < tokens * CHOICES)
        tl.store(p_member + i_row.to(tl.int64) * WIDTH + o_channel, b_row, mask=m_row)


@triton.jit
def copies_collect_kernel(
    p_rows,
    p_positions,
    p_weights,
    tokens,
    p_out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOICES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SHARED_POSITIONS: tl.constexpr,
    SHARED_WEIGHTS: tl.constexpr,
):
    """`out[t] = sum_j weights[t, j] * rows[positions[t, j]]`."""
    COLUMNS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    i_token = tl.program_id(0) // COLUMNS  # of the whole batch
    i_batch = i_token // tokens
    o_channel = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_channel = o_channel < WIDTH
    o_positions = (i_token % tokens if SHARED_POSITIONS else i_token).to(tl.int64) * CHOICES
    o_weights = (i_token % tokens if SHARED_WEIGHTS else i_token).to(tl.int64) * CHOICES
    p_member = p_rows + i_batch.to(tl.int64) * tokens * CHOICES * WIDTH
    b_out = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        i_row = tl.load(p_positions + o_positions + choice)
        taken = (i_row >= 0) & (i_row < tokens * CHOICES)
        b_row = tl.load(p_member + i_row.to(tl.int64) * WIDTH + o_channel, mask=m_channel & taken, other=0.0)  # [BLOCK]
        b_row = b_row.to(tl.float32)
        if WEIGHTED:
            b_row = b_row * tl.load(p_weights + o_weights + choice, mask=taken, other=0.0).to(tl.float32)
        b_out += b_row
    tl.store(p_out + i_token.to(tl.int64) * WIDTH + o_channel, b_out.to(p_out.dtype.element_ty), mask=m_channel)


def constants_of(positions: Any, weights: Any, batch: int) -> dict[str, Any]:
    """The constants that all kernels over copies share."""
    return {
        "CHOICES": positions.shape[2],
        "SHARED_POSITIONS": positions.shape[0] < batch,
        "SHARED_WEIGHTS": weights is not None and weights.shape[0] < batch,
    }


def _move(kernel: Any, source: Any, positions: Any, weights: Any, rows: int, config: Config) -> Any:
    batch, _, width = source.shape
    tokens = positions.shape[1]
    shape = (batch, rows, width)
    if not source.size or not tokens:
        return jnp.zeros(shape, source.dtype)
    (out,) = call_kernel(
        kernel,
        (source, positions, positions if weights is None else weights, tokens),
        ((shape, source.dtype),),
        grid=batch * tokens * -(-width // config.block),
        WIDTH=width,
        BLOCK=config.block,
        WEIGHTED=weights is not None,
        num_warps=config.num_warps,
        **constants_of(positions, weights, batch),
    )
    return out


def spread(x: Any, positions: Any, weights: Any, config: Config) -> Any:
    """`rows [b, t * k, d]` in the dtype of x; every row is written, those of copies without part with 0."""
    return _move(copies_spread_kernel, x, positions, weights, positions.shape[1] * positions.shape[2], config)


def collect(rows: Any, positions: Any, weights: Any, config: Config) -> Any:
    """`out [b, t, d]` in the dtype of rows."""
    return _move(copies_collect_kernel, rows, positions, weights, positions.shape[1], config)
