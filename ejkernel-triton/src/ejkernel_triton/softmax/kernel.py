"""Softmax over the last axis: a program holds whole rows in registers, so that every array passes memory once.

Rows too wide for that are walked over twice, the second time backwards, so that it begins with what the cache still holds: first
for the largest value and the sum, which is rescaled when a larger value comes, then for the result. Sums are float32.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
import math
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.softmax.interface import SoftmaxCall, SoftmaxInputs, SoftmaxOutputs
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._rows.config import padded
from ejkernel_triton.softmax.config import Config
from ejkernel_triton.softmax.mask import mask_of, masked

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Instead of -inf as the largest value of rows without one: exp(-inf - LOWEST) is 0 and not NaN."""


@triton.jit
def softmax_forward_kernel(
    p_x,
    p_where,
    rows,
    middle,
    inner,
    p_out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WHERE: tl.constexpr,
    SCALE: tl.constexpr,
):
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    o_width = tl.arange(0, BLOCK)  # [BLOCK]
    m_row = i_row < rows
    m_tile = m_row[:, None] & (o_width < WIDTH)[None, :]
    o_tile = i_row.to(tl.int64)[:, None] * WIDTH + o_width[None, :]
    m_part = masked(m_tile, p_where, i_row, m_row, o_width, middle, inner, WIDTH, WHERE)

    b_x = tl.load(p_x + o_tile, mask=m_tile, other=0.0).to(tl.float32) * SCALE  # [ROWS, BLOCK]
    b_x = tl.where(m_part, b_x, float("-inf"))
    b_largest = tl.maximum(tl.max(b_x, axis=1), LOWEST)  # [ROWS]
    b_weights = tl.exp(b_x - b_largest[:, None])
    b_total = tl.sum(b_weights, axis=1)  # [ROWS]
    b_inverse = 1.0 / tl.where(b_total == 0.0, 1.0, b_total)
    tl.store(p_out + o_tile, (b_weights * b_inverse[:, None]).to(p_out.dtype.element_ty), mask=m_tile)


@triton.jit
def softmax_forward_walking_kernel(
    p_x,
    p_where,
    middle,
    inner,
    p_out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WHERE: tl.constexpr,
    SCALE: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_row = tl.program_id(0) + tl.arange(0, 1)  # [1]
    o_row = i_row.to(tl.int64)[:, None] * WIDTH
    STEPS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    b_largest = tl.full([1], LOWEST, tl.float32)
    b_sums = tl.zeros([1, BLOCK], tl.float32)
    for i_step in tl.range(0, STEPS, num_stages=STAGES):
        o_width = i_step * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        m_tile = (o_width < WIDTH)[None, :]
        m_part = masked(m_tile, p_where, i_row, i_row >= 0, o_width, middle, inner, WIDTH, WHERE)
        b_x = tl.load(p_x + o_row + o_width[None, :], mask=m_tile, other=0.0).to(tl.float32) * SCALE  # [1, BLOCK]
        b_x = tl.where(m_part, b_x, float("-inf"))
        b_larger = tl.maximum(b_largest, tl.max(b_x, axis=1))
        b_sums = b_sums * tl.exp(b_largest - b_larger)[:, None] + tl.exp(b_x - b_larger[:, None])
        b_largest = b_larger
    b_total = tl.sum(b_sums, axis=1)  # [1]
    b_inverse = 1.0 / tl.where(b_total == 0.0, 1.0, b_total)

    for i_back in tl.range(0, STEPS, num_stages=STAGES):
        o_width = (STEPS - 1 - i_back) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        m_tile = (o_width < WIDTH)[None, :]
        m_part = masked(m_tile, p_where, i_row, i_row >= 0, o_width, middle, inner, WIDTH, WHERE)
        b_x = tl.load(p_x + o_row + o_width[None, :], mask=m_tile, other=0.0).to(tl.float32) * SCALE  # [1, BLOCK]
        b_out = tl.exp(tl.where(m_part, b_x, float("-inf")) - b_largest[:, None]) * b_inverse[:, None]
        tl.store(p_out + o_row + o_width[None, :], b_out.to(p_out.dtype.element_ty), mask=m_tile)


@triton.jit
def softmax_backward_kernel(
    p_out,
    p_grad,
    p_where,
    rows,
    middle,
    inner,
    p_dx,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WHERE: tl.constexpr,
    SCALE: tl.constexpr,
):
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    o_width = tl.arange(0, BLOCK)  # [BLOCK]
    m_row = i_row < rows
    m_tile = m_row[:, None] & (o_width < WIDTH)[None, :]
    o_tile = i_row.to(tl.int64)[:, None] * WIDTH + o_width[None, :]
    m_part = masked(m_tile, p_where, i_row, m_row, o_width, middle, inner, WIDTH, WHERE)

    b_out = tl.load(p_out + o_tile, mask=m_tile, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    b_grad = tl.load(p_grad + o_tile, mask=m_tile, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    if WHERE != 0:
        b_grad = tl.where(m_part, b_grad, 0.0)
    b_sum = tl.sum(b_out * b_grad, axis=1)  # [ROWS]
    b_dx = b_out * (b_grad - b_sum[:, None]) * SCALE
    tl.store(p_dx + o_tile, b_dx.to(p_dx.dtype.element_ty), mask=m_tile)


@triton.jit
def softmax_backward_walking_kernel(
    p_out,
    p_grad,
    p_where,
    middle,
    inner,
    p_dx,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WHERE: tl.constexpr,
    SCALE: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_row = tl.program_id(0) + tl.arange(0, 1)  # [1]
    o_row = i_row.to(tl.int64)[:, None] * WIDTH
    STEPS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    b_sums = tl.zeros([1, BLOCK], tl.float32)
    for i_step in tl.range(0, STEPS, num_stages=STAGES):
        o_width = i_step * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        m_tile = (o_width < WIDTH)[None, :]
        b_out = tl.load(p_out + o_row + o_width[None, :], mask=m_tile, other=0.0).to(tl.float32)  # [1, BLOCK]
        b_grad = tl.load(p_grad + o_row + o_width[None, :], mask=m_tile, other=0.0).to(tl.float32)  # [1, BLOCK]
        if WHERE != 0:
            m_part = masked(m_tile, p_where, i_row, i_row >= 0, o_width, middle, inner, WIDTH, WHERE)
            b_grad = tl.where(m_part, b_grad, 0.0)
        b_sums += b_out * b_grad
    b_sum = tl.sum(b_sums, axis=1)  # [1]

    for i_back in tl.range(0, STEPS, num_stages=STAGES):
        o_width = (STEPS - 1 - i_back) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        m_tile = (o_width < WIDTH)[None, :]
        b_out = tl.load(p_out + o_row + o_width[None, :], mask=m_tile, other=0.0).to(tl.float32)  # [1, BLOCK]
        b_grad = tl.load(p_grad + o_row + o_width[None, :], mask=m_tile, other=0.0).to(tl.float32)  # [1, BLOCK]
        if WHERE != 0:
            m_part = masked(m_tile, p_where, i_row, i_row >= 0, o_width, middle, inner, WIDTH, WHERE)
            b_grad = tl.where(m_part, b_grad, 0.0)
        b_dx = b_out * (b_grad - b_sum[:, None]) * SCALE
        tl.store(p_dx + o_row + o_width[None, :], b_dx.to(p_dx.dtype.element_ty), mask=m_tile)


def _call(held: Any, walking: Any, arrays: tuple[Any, ...], call: SoftmaxCall, inputs: SoftmaxInputs, config: Config) -> Any:
    """One array like x, by the kernel that holds rows or the one that walks over them."""
    x = inputs.x
    mask = mask_of(x, inputs.where)
    rows = math.prod(x.shape[:-1])
    constants = {"WIDTH": x.shape[-1], "WHERE": mask.kind, "SCALE": call.scale, "num_warps": config.num_warps}
    repetition = (mask.middle, mask.inner)
    result = ((x.shape, x.dtype),)
    if config.block:
        steps = {"BLOCK": config.block, "STAGES": config.num_stages, **constants}
        return call_kernel(walking, (*arrays, mask.where, *repetition), result, grid=rows, **steps)[0]
    tile = {"BLOCK": padded(x.shape[-1]), "ROWS": config.rows, **constants}
    return call_kernel(held, (*arrays, mask.where, rows, *repetition), result, grid=-(-rows // config.rows), **tile)[0]


def forward(call: SoftmaxCall, inputs: SoftmaxInputs, config: Config) -> SoftmaxOutputs:
    if not inputs.x.size:
        return SoftmaxOutputs(jnp.zeros_like(inputs.x))
    return SoftmaxOutputs(_call(softmax_forward_kernel, softmax_forward_walking_kernel, (inputs.x,), call, inputs, config))


def backward(
    call: SoftmaxCall, inputs: SoftmaxInputs, outputs: SoftmaxOutputs, cotangents: SoftmaxOutputs, config: Config
) -> SoftmaxInputs:
    if not inputs.x.size:
        return SoftmaxInputs(jnp.zeros_like(inputs.x))
    arrays = (outputs.out, cotangents.out)
    return SoftmaxInputs(_call(softmax_backward_kernel, softmax_backward_walking_kernel, arrays, call, inputs, config))
