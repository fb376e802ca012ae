"""The sum of two arrays and its root-mean-square normalisation: one kernel reads both and writes sum and norm.

The sum is rounded before it is normed, as it is returned. Rows that no program holds are read twice, the second time in reverse
order. Backward is the norm's, of the sum, with the sum's own cotangent added before the gradient is written.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false
import math

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.add_rms_norm.interface import AddRmsNormCall, AddRmsNormInputs, AddRmsNormOutputs
from ejkernel.operations.common.rows.interface import NormInputs, square_unit
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._rows.config import BackwardConfig
from ejkernel_triton._rows.kernel import cdiv, norm_backward_added, storage
from ejkernel_triton._rows.splits import inverse_deviation, squares_of, with_parameters
from ejkernel_triton.add_rms_norm.config import ForwardConfig, as_norm


@triton.jit
def load_sum(p_x, p_residual, o_tile, m_tile):
    """`x + residual` in the dtype of residual."""
    b_x = tl.load(p_x + o_tile, mask=m_tile, other=0.0).to(tl.float32)
    b_residual = tl.load(p_residual + o_tile, mask=m_tile, other=0.0).to(tl.float32)
    return (b_x + b_residual).to(p_residual.dtype.element_ty)


@triton.jit
def add_rms_norm_forward_kernel(
    p_x,
    p_residual,
    p_scale,
    rows,
    rows_per_batch,
    p_out,
    p_sum,
    p_rstd,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SCALE: tl.constexpr,
    SAVE: tl.constexpr,
    EPSILON: tl.constexpr,
    UNIT: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
):
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    o_width = tl.arange(0, BLOCK)  # [BLOCK]
    m_row = i_row < rows
    m_width = o_width < WIDTH
    m_tile = m_row[:, None] & m_width[None, :]
    o_tile = i_row.to(tl.int64)[:, None] * WIDTH + o_width[None, :]
    o_param = (i_row // rows_per_batch).to(tl.int64)[:, None] * WIDTH + o_width[None, :]
    b_stored = load_sum(p_x, p_residual, o_tile, m_tile)  # [ROWS, BLOCK]
    tl.store(p_sum + o_tile, b_stored, mask=m_tile)
    b_sum = b_stored.to(tl.float32)
    b_rstd = inverse_deviation(squares_of(b_sum, 1, UNIT), 0.0, WIDTH, EPSILON, UNIT)  # [ROWS]
    b_out = with_parameters(
        b_sum * b_rstd[:, None], p_scale, p_scale, o_width, o_param, m_width, m_tile, SCALE, 0, SCALE_OFFSET
    )
    tl.store(p_out + o_tile, b_out.to(p_out.dtype.element_ty), mask=m_tile)
    if SAVE:
        tl.store(p_rstd + i_row, b_rstd, mask=m_row)


@triton.jit
def add_rms_norm_forward_looped_kernel(
    p_x,
    p_residual,
    p_scale,
    rows_per_batch,
    p_out,
    p_sum,
    p_rstd,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    SAVE: tl.constexpr,
    EPSILON: tl.constexpr,
    UNIT: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
):
    """The second pass adds again: what other threads have stored of the sum need not be there yet."""
    i_row = tl.program_id(0)
    o_row = i_row.to(tl.int64) * WIDTH
    o_param = (i_row // rows_per_batch).to(tl.int64) * WIDTH
    STEPS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    b_squares = tl.zeros([BLOCK], tl.float32)
    for i_step in tl.range(0, STEPS):
        o_width = i_step * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        m_width = o_width < WIDTH
        b_stored = load_sum(p_x, p_residual, o_row + o_width, m_width)  # [BLOCK]
        tl.store(p_sum + o_row + o_width, b_stored, mask=m_width)
        b_sum = b_stored.to(tl.float32) * UNIT
        b_squares += b_sum * b_sum
    b_rstd = inverse_deviation(tl.sum(b_squares), 0.0, WIDTH, EPSILON, UNIT)
    for i_back in tl.range(0, STEPS):
        o_width = (STEPS - 1 - i_back) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        m_width = o_width < WIDTH
        b_sum = load_sum(p_x, p_residual, o_row + o_width, m_width).to(tl.float32)  # [BLOCK]
        b_out = with_parameters(
            (b_sum * b_rstd)[None, :], p_scale, p_scale, o_width, (o_param + o_width)[None, :], m_width, m_width[None, :],
            SCALE, 0, SCALE_OFFSET,
        )  # fmt: skip
        tl.store(p_out + (o_row + o_width)[None, :], b_out.to(p_out.dtype.element_ty), mask=m_width[None, :])
    if SAVE:
        tl.store(p_rstd + i_row, b_rstd)


def forward(call: AddRmsNormCall, inputs: AddRmsNormInputs, config: ForwardConfig) -> AddRmsNormOutputs:
    x, residual, scale = inputs
    save, shape = call.save_residuals, x.shape
    if not x.size:
        rstd = jnp.full(shape[:-1], call.epsilon**-0.5 if call.epsilon else jnp.inf, jnp.float32)
        return AddRmsNormOutputs(x, residual, rstd if save else None)
    rows, width = math.prod(shape[:-1]), shape[-1]
    launch = {
        "WIDTH": width, "BLOCK": config.block or next_power_of_2(width), "SCALE": storage(scale), "SAVE": save,
        "EPSILON": call.epsilon, "UNIT": square_unit(residual.dtype, call.epsilon), "SCALE_OFFSET": call.scale_offset,
        "num_warps": config.num_warps,
    }  # fmt: skip
    arrays, repetition = (x, residual, x if scale is None else scale), rows // shape[0]
    results = ((shape, x.dtype), (shape, residual.dtype), (shape[:-1] if save else (1,), jnp.float32))
    if config.block:
        kernel = add_rms_norm_forward_looped_kernel
        out, total, rstd = call_kernel(kernel, (*arrays, repetition), results, grid=rows, **launch)
    else:
        launch |= {"grid": cdiv(rows, config.rows), "ROWS": config.rows}
        out, total, rstd = call_kernel(add_rms_norm_forward_kernel, (*arrays, rows, repetition), results, **launch)
    return AddRmsNormOutputs(out, total, rstd if save else None)


def backward(
    call: AddRmsNormCall,
    inputs: AddRmsNormInputs,
    outputs: AddRmsNormOutputs,
    cotangents: AddRmsNormOutputs,
    config: BackwardConfig,
) -> AddRmsNormInputs:
    given = NormInputs(outputs.sum, inputs.scale)
    gradients, d_x = norm_backward_added(
        as_norm(call), given, None, outputs.rstd, cotangents.out, config, cotangents.sum, inputs.x.dtype
    )
    return AddRmsNormInputs(d_x, gradients.x, gradients.scale)
