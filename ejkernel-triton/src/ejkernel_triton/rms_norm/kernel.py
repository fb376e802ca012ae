"""Root-mean-square normalisation: a program holds whole rows in registers, so every array passes memory once.

Statistics and sums are float32. In backward each program walks over its tiles in a fixed order and writes one partial sum of
the parameters' gradients; a last small sum adds the programs up, without atomics.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
import math
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.rms_norm.interface import RmsNormCall, RmsNormInputs, RmsNormOutputs
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.rms_norm.config import BackwardConfig, ForwardConfig, padded_width

ABSENT, SHARED, PER_BATCH = 0, 1, 2
"""How a parameter is stored: not at all, `[1, d]`, or `[b, d]` with b > 1."""


@triton.jit
def rms_norm_forward_kernel(
    p_x,
    p_scale,
    p_offset,
    rows,
    rows_per_batch,
    p_out,
    p_rstd,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    SAVE_RSTD: tl.constexpr,
    EPSILON: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
):
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    o_width = tl.arange(0, BLOCK)  # [BLOCK]
    m_width = o_width < WIDTH
    m_tile = (i_row < rows)[:, None] & m_width[None, :]
    o_tile = i_row.to(tl.int64)[:, None] * WIDTH + o_width[None, :]
    o_param = (i_row // rows_per_batch).to(tl.int64)[:, None] * WIDTH + o_width[None, :]

    b_x = tl.load(p_x + o_tile, mask=m_tile, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / WIDTH + EPSILON)  # [ROWS]
    b_out = b_x * b_rstd[:, None]
    if SCALE == 1:
        b_out *= tl.load(p_scale + o_width, mask=m_width, other=0.0).to(tl.float32)[None, :] + SCALE_OFFSET
    if SCALE == 2:
        b_out *= tl.load(p_scale + o_param, mask=m_tile, other=0.0).to(tl.float32) + SCALE_OFFSET
    if OFFSET == 1:
        b_out += tl.load(p_offset + o_width, mask=m_width, other=0.0).to(tl.float32)[None, :]
    if OFFSET == 2:
        b_out += tl.load(p_offset + o_param, mask=m_tile, other=0.0).to(tl.float32)
    tl.store(p_out + o_tile, b_out.to(p_out.dtype.element_ty), mask=m_tile)
    if SAVE_RSTD:
        tl.store(p_rstd + i_row, b_rstd, mask=i_row < rows)


@triton.jit
def rms_norm_backward_kernel(
    p_x,
    p_scale,
    p_rstd,
    p_grad,
    rows,
    programs,
    p_dx,
    p_dscale,
    p_doffset,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SCALE: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`rows` rows lie under one parameter row (a group); `programs` programs share them."""
    i_program = tl.program_id(0)
    i_group = (i_program // programs).to(tl.int64)
    o_width = tl.arange(0, BLOCK)  # [BLOCK]
    m_width = o_width < WIDTH
    if SCALE != 0:
        o_scale = i_group * WIDTH if SCALE == 2 else 0
        b_scale = tl.load(p_scale + o_scale + o_width, mask=m_width, other=0.0).to(tl.float32) + SCALE_OFFSET  # [BLOCK]
    b_dscale = tl.zeros([ROWS, BLOCK], tl.float32)
    b_doffset = tl.zeros([ROWS, BLOCK], tl.float32)

    for i_tile in tl.range(i_program % programs, tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        i_local = i_tile * ROWS + tl.arange(0, ROWS)  # [ROWS]
        m_row = i_local < rows
        i_row = i_group * rows + i_local
        m_tile = m_row[:, None] & m_width[None, :]
        o_tile = i_row[:, None] * WIDTH + o_width[None, :]
        b_x = tl.load(p_x + o_tile, mask=m_tile, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
        b_grad = tl.load(p_grad + o_tile, mask=m_tile, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
        b_rstd = tl.load(p_rstd + i_row, mask=m_row, other=0.0)  # [ROWS]
        b_normalised = b_x * b_rstd[:, None]
        b_weighted = b_grad
        if SCALE != 0:
            b_weighted = b_grad * b_scale[None, :]
            b_dscale += b_grad * b_normalised
        if OFFSET:
            b_doffset += b_grad
        b_mean = tl.sum(b_weighted * b_normalised, axis=1) / WIDTH  # [ROWS]
        b_dx = b_rstd[:, None] * (b_weighted - b_normalised * b_mean[:, None])
        tl.store(p_dx + o_tile, b_dx.to(p_dx.dtype.element_ty), mask=m_tile)

    o_partial = i_program.to(tl.int64) * WIDTH + o_width
    if SCALE != 0:
        tl.store(p_dscale + o_partial, tl.sum(b_dscale, axis=0), mask=m_width)
    if OFFSET:
        tl.store(p_doffset + o_partial, tl.sum(b_doffset, axis=0), mask=m_width)


def _storage(parameter: Any) -> int:
    if parameter is None:
        return ABSENT
    return PER_BATCH if parameter.shape[0] > 1 else SHARED


def _cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _rows(shape: tuple[int, ...]) -> int:
    return math.prod(shape[:-1])


def forward(call: RmsNormCall, inputs: RmsNormInputs, config: ForwardConfig) -> RmsNormOutputs:
    x, scale, offset = inputs
    shape = x.shape
    if not x.size:
        rstd = jnp.full(shape[:-1], call.epsilon**-0.5 if call.epsilon else jnp.inf, jnp.float32)
        return RmsNormOutputs(x, rstd if call.save_residuals else None)
    rows = _rows(shape)
    out, rstd = call_kernel(
        rms_norm_forward_kernel,
        (x, x if scale is None else scale, x if offset is None else offset, rows, rows // shape[0]),
        ((shape, x.dtype), (shape[:-1] if call.save_residuals else (1,), jnp.float32)),
        grid=_cdiv(rows, config.rows),
        num_warps=config.num_warps,
        WIDTH=shape[-1],
        BLOCK=padded_width(call),
        ROWS=config.rows,
        SCALE=_storage(scale),
        OFFSET=_storage(offset),
        SAVE_RSTD=call.save_residuals,
        EPSILON=call.epsilon,
        SCALE_OFFSET=call.scale_offset,
    )
    return RmsNormOutputs(out, rstd if call.save_residuals else None)


def backward(
    call: RmsNormCall, inputs: RmsNormInputs, outputs: RmsNormOutputs, cotangents: RmsNormOutputs, config: BackwardConfig
) -> RmsNormInputs:
    x, scale, offset = inputs
    if not x.size:
        return RmsNormInputs(*(None if value is None else jnp.zeros_like(value) for value in inputs))
    groups = x.shape[0] if PER_BATCH in (_storage(scale), _storage(offset)) else 1
    rows = _rows(x.shape) // groups
    programs = min(config.programs, _cdiv(rows, config.rows))
    if scale is None and offset is None:
        programs = _cdiv(rows, config.rows)
    elif groups > 1:
        programs = min(programs, _cdiv(config.programs, groups))
    partial = (groups, programs, x.shape[-1])
    d_x, d_scale, d_offset = call_kernel(
        rms_norm_backward_kernel,
        (x, x if scale is None else scale, outputs.rstd, cotangents.out, rows, programs),
        (
            (x.shape, x.dtype),
            ((1,) if scale is None else partial, jnp.float32),
            ((1,) if offset is None else partial, jnp.float32),
        ),
        grid=groups * programs,
        num_warps=config.num_warps,
        WIDTH=x.shape[-1],
        BLOCK=padded_width(call),
        ROWS=config.rows,
        SCALE=_storage(scale),
        OFFSET=_storage(offset) != ABSENT,
        SCALE_OFFSET=call.scale_offset,
        STAGES=config.num_stages,
    )
    return RmsNormInputs(d_x, _sum_of_partials(d_scale, scale), _sum_of_partials(d_offset, offset))


def _sum_of_partials(partials: Any, parameter: Any) -> Any:
    """Add up `[groups, programs, d]` to the parameter's `[1 or b, d]`."""
    if parameter is None:
        return None
    total = jnp.sum(partials, axis=1 if parameter.shape[0] == partials.shape[0] else (0, 1))
    return total.reshape(parameter.shape).astype(parameter.dtype)
