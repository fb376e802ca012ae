"""Softmax over the last axis. A single-pass program holds whole rows in registers, so every array is read once.

Wider rows are split over cooperating programs (`_rows.cooperative`), which combine partial maxima and sums. Or one looped
program reads a row twice, the second time in reverse order, so that it starts with cached data: first for an online maximum and
sum, then for the result. Sums are float32.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.softmax.interface import SoftmaxCall, SoftmaxInputs, SoftmaxOutputs
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._rows.cooperative import OPAQUE_ZERO, arrive_and_wait, spin_limit, splits_of, zero_counters
from ejkernel_triton.softmax.config import Config
from ejkernel_triton.softmax.mask import mask_of, masked
from ejkernel_triton.softmax.persistent import softmax_backward_persistent_cooperative_kernel, softmax_forward_persistent_kernel
from ejkernel_triton.softmax.splits import (
    LOWEST,
    backward_of_split,
    combine_products,
    combine_sums,
    forward_of_split,
    logits_of,
    split_offsets,
    store_partial_sums,
)


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
    m_where = masked(m_tile, p_where, i_row, m_row, o_width, middle, inner, WIDTH, WHERE)

    b_x = tl.load(p_x + o_tile, mask=m_tile, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    b_x = logits_of(b_x, m_where, SCALE)
    b_max = tl.maximum(tl.max(b_x, axis=1), LOWEST)  # [ROWS]
    b_weights = tl.exp(b_x - b_max[:, None])
    b_sum = tl.sum(b_weights, axis=1)  # [ROWS]
    b_inverse = 1.0 / tl.where(b_sum == 0.0, 1.0, b_sum)
    tl.store(p_out + o_tile, (b_weights * b_inverse[:, None]).to(p_out.dtype.element_ty), mask=m_tile)


@triton.jit
def softmax_forward_looped_kernel(
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
    b_max = tl.full([1], LOWEST, tl.float32)
    b_sums = tl.zeros([1, BLOCK], tl.float32)
    for i_step in tl.range(0, STEPS, num_stages=STAGES):
        o_width = i_step * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        m_tile = (o_width < WIDTH)[None, :]
        m_where = masked(m_tile, p_where, i_row, i_row >= 0, o_width, middle, inner, WIDTH, WHERE)
        b_x = tl.load(p_x + o_row + o_width[None, :], mask=m_tile, other=0.0).to(tl.float32)  # [1, BLOCK]
        b_x = logits_of(b_x, m_where, SCALE)
        b_new_max = tl.maximum(b_max, tl.max(b_x, axis=1))
        b_sums = b_sums * tl.exp(b_max - b_new_max)[:, None] + tl.exp(b_x - b_new_max[:, None])
        b_max = b_new_max
    b_sum = tl.sum(b_sums, axis=1)  # [1]
    b_inverse = 1.0 / tl.where(b_sum == 0.0, 1.0, b_sum)

    for i_back in tl.range(0, STEPS, num_stages=STAGES):
        o_width = (STEPS - 1 - i_back) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        m_tile = (o_width < WIDTH)[None, :]
        m_where = masked(m_tile, p_where, i_row, i_row >= 0, o_width, middle, inner, WIDTH, WHERE)
        b_x = tl.load(p_x + o_row + o_width[None, :], mask=m_tile, other=0.0).to(tl.float32)  # [1, BLOCK]
        b_out = tl.exp(logits_of(b_x, m_where, SCALE) - b_max[:, None]) * b_inverse[:, None]
        tl.store(p_out + o_row + o_width[None, :], b_out.to(p_out.dtype.element_ty), mask=m_tile)


@triton.jit
def softmax_forward_cooperative_kernel(
    p_x,
    p_where,
    p_counters_before,
    items,
    middle,
    inner,
    p_out,
    p_counters,
    p_sums,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    SPIN_LIMIT: tl.constexpr,
    WHERE: tl.constexpr,
    SCALE: tl.constexpr,
):
    """A program holds one split of a row (`_rows.cooperative`). Its partial sums are the maximum and the sum of the weights."""
    SPLITS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    i_row = tl.program_id(0) // SPLITS
    i_split = tl.program_id(0) % SPLITS
    o_tile, m_tile, m_where = split_offsets(i_row, i_split, p_where, middle, inner, WIDTH, BLOCK, WHERE)
    b_stored = tl.load(p_x + o_tile, mask=m_tile, other=0.0)  # [1, BLOCK]
    p_sum = p_sums + tl.program_id(0) + tl.arange(0, 1)
    store_partial_sums(b_stored.to(tl.float32), b_stored, m_where, p_sum, items, items >> 31, SCALE)
    arrived, deferred, zero = arrive_and_wait(p_counters + i_row, i_split, SPLITS, SPIN_LIMIT)
    if arrived:
        b_max, b_inverse = combine_sums(p_sums, items, i_row, SPLITS, SPLITS_BLOCK)
        b_out = forward_of_split(b_stored, m_where, b_max, b_inverse, zero, SCALE)
        tl.store(p_out + o_tile, b_out.to(p_out.dtype.element_ty), mask=m_tile)
        if deferred != 0:
            for i_other in tl.range(0, SPLITS):
                if ((deferred >> i_other) & 1) != 0:
                    o_other, m_other, m_other_where = split_offsets(i_row, i_other, p_where, middle, inner, WIDTH, BLOCK, WHERE)
                    b_other = tl.load(p_x + o_other, mask=m_other, other=0.0)  # [1, BLOCK]
                    b_out = forward_of_split(b_other, m_other_where, b_max, b_inverse, zero, SCALE)
                    tl.store(p_out + o_other, b_out.to(p_out.dtype.element_ty), mask=m_other)


@triton.jit
def softmax_backward_cooperative_kernel(
    p_out,
    p_grad,
    p_where,
    p_counters_before,
    items,
    middle,
    inner,
    p_dx,
    p_counters,
    p_sums,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    SPIN_LIMIT: tl.constexpr,
    WHERE: tl.constexpr,
    SCALE: tl.constexpr,
):
    """A program holds one split of a row of the output and of its gradient (`_rows.cooperative`)."""
    SPLITS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    i_row = tl.program_id(0) // SPLITS
    i_split = tl.program_id(0) % SPLITS
    o_tile, m_tile, m_where = split_offsets(i_row, i_split, p_where, middle, inner, WIDTH, BLOCK, WHERE)
    b_out = tl.load(p_out + o_tile, mask=m_tile, other=0.0)  # [1, BLOCK]
    b_grad = tl.load(p_grad + o_tile, mask=m_tile, other=0.0)  # [1, BLOCK]
    if WHERE != 0:
        b_grad = tl.where(m_where, b_grad, 0.0)
    tl.store(p_sums + tl.program_id(0) + tl.arange(0, 1), tl.sum(b_out.to(tl.float32) * b_grad.to(tl.float32), axis=1))
    arrived, deferred, zero = arrive_and_wait(p_counters + i_row, i_split, SPLITS, SPIN_LIMIT)
    if arrived:
        b_sum = combine_products(p_sums, i_row, SPLITS, SPLITS_BLOCK)
        b_dx = backward_of_split(b_out, b_grad, b_sum, zero, SCALE)
        tl.store(p_dx + o_tile, b_dx.to(p_dx.dtype.element_ty), mask=m_tile)
        if deferred != 0:
            for i_other in tl.range(0, SPLITS):
                if ((deferred >> i_other) & 1) != 0:
                    o_other, m_other, m_other_where = split_offsets(i_row, i_other, p_where, middle, inner, WIDTH, BLOCK, WHERE)
                    b_other = tl.load(p_out + o_other, mask=m_other, other=0.0)  # [1, BLOCK]
                    b_other_grad = tl.load(p_grad + o_other, mask=m_other, other=0.0)  # [1, BLOCK]
                    if WHERE != 0:
                        b_other_grad = tl.where(m_other_where, b_other_grad, 0.0)
                    b_dx = backward_of_split(b_other, b_other_grad, b_sum, zero, SCALE)
                    tl.store(p_dx + o_other, b_dx.to(p_dx.dtype.element_ty), mask=m_other)


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
    m_where = masked(m_tile, p_where, i_row, m_row, o_width, middle, inner, WIDTH, WHERE)

    b_out = tl.load(p_out + o_tile, mask=m_tile, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    b_grad = tl.load(p_grad + o_tile, mask=m_tile, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    if WHERE != 0:
        b_grad = tl.where(m_where, b_grad, 0.0)
    b_sum = tl.sum(b_out * b_grad, axis=1)  # [ROWS]
    b_dx = b_out * (b_grad - b_sum[:, None]) * SCALE
    tl.store(p_dx + o_tile, b_dx.to(p_dx.dtype.element_ty), mask=m_tile)


@triton.jit
def softmax_backward_looped_kernel(
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
            m_where = masked(m_tile, p_where, i_row, i_row >= 0, o_width, middle, inner, WIDTH, WHERE)
            b_grad = tl.where(m_where, b_grad, 0.0)
        b_sums += b_out * b_grad
    b_sum = tl.sum(b_sums, axis=1)  # [1]

    for i_back in tl.range(0, STEPS, num_stages=STAGES):
        o_width = (STEPS - 1 - i_back) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        m_tile = (o_width < WIDTH)[None, :]
        b_out = tl.load(p_out + o_row + o_width[None, :], mask=m_tile, other=0.0).to(tl.float32)  # [1, BLOCK]
        b_grad = tl.load(p_grad + o_row + o_width[None, :], mask=m_tile, other=0.0).to(tl.float32)  # [1, BLOCK]
        if WHERE != 0:
            m_where = masked(m_tile, p_where, i_row, i_row >= 0, o_width, middle, inner, WIDTH, WHERE)
            b_grad = tl.where(m_where, b_grad, 0.0)
        b_dx = b_out * (b_grad - b_sum[:, None]) * SCALE
        tl.store(p_dx + o_row + o_width[None, :], b_dx.to(p_dx.dtype.element_ty), mask=m_tile)


class _Kernels(NamedTuple):
    """The kernels of one phase by how rows map to programs. Persistent ones are None if the phase has none."""

    single_pass: Any
    looped: Any
    cooperative: Any
    persistent: Any = None
    persistent_cooperative: Any = None


_FORWARD = _Kernels(
    softmax_forward_kernel,
    softmax_forward_looped_kernel,
    softmax_forward_cooperative_kernel,
    persistent=softmax_forward_persistent_kernel,
)
_BACKWARD = _Kernels(
    softmax_backward_kernel,
    softmax_backward_looped_kernel,
    softmax_backward_cooperative_kernel,
    persistent_cooperative=softmax_backward_persistent_cooperative_kernel,
)


def _call(kernels: _Kernels, arrays: tuple[Any, ...], call: SoftmaxCall, inputs: SoftmaxInputs, config: Config) -> Any:
    """Run a kernel whose result is like x."""
    x = inputs.x
    mask = mask_of(x, inputs.where)
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    stay = kernels.persistent_cooperative if config.cooperative else kernels.persistent
    programs = min(config.programs, rows) if stay else 0
    constants = {"WIDTH": width, "WHERE": mask.kind, "SCALE": call.scale, "num_warps": config.num_warps}
    arrays, repetition = (*arrays, mask.where), (mask.middle, mask.inner)
    opaque_zero = (OPAQUE_ZERO,) if programs else ()
    result = ((x.shape, x.dtype),)
    if config.cooperative:
        splits = splits_of(width, config.block)
        loop = (rows, programs) if programs else ()
        deferred = (((rows * splits,), jnp.int32),) if programs else ()
        return call_kernel(
            stay if programs else kernels.cooperative,
            (*arrays, zero_counters(rows), *loop, rows * splits, *repetition, *opaque_zero),
            (*result, ((rows,), jnp.int32), ((2, rows * splits), jnp.float32), *deferred),
            grid=(programs or rows) * splits,
            input_output_aliases={len(arrays): 1},
            BLOCK=config.block,
            SPLITS_BLOCK=next_power_of_2(splits),
            SPIN_LIMIT=spin_limit(),
            **({"STAGES": config.num_stages} if programs else {}),
            **constants,
        )[0]
    if config.block:
        steps = {"BLOCK": config.block, "STAGES": config.num_stages, **constants}
        return call_kernel(kernels.looped, (*arrays, *repetition), result, grid=rows, **steps)[0]
    tile = {"BLOCK": next_power_of_2(width), **constants}
    if programs:
        tile = {"STAGES": config.num_stages, **tile}
        return call_kernel(stay, (*arrays, rows, programs, *repetition, *opaque_zero), result, grid=programs, **tile)[0]
    grid = -(-rows // config.rows)
    return call_kernel(kernels.single_pass, (*arrays, rows, *repetition), result, grid=grid, ROWS=config.rows, **tile)[0]


def forward(call: SoftmaxCall, inputs: SoftmaxInputs, config: Config) -> SoftmaxOutputs:
    if not inputs.x.size:
        return SoftmaxOutputs(jnp.zeros_like(inputs.x))
    return SoftmaxOutputs(_call(_FORWARD, (inputs.x,), call, inputs, config))


def backward(
    call: SoftmaxCall, inputs: SoftmaxInputs, outputs: SoftmaxOutputs, cotangents: SoftmaxOutputs, config: Config
) -> SoftmaxInputs:
    if not inputs.x.size:
        return SoftmaxInputs(jnp.zeros_like(inputs.x))
    arrays = (outputs.out, cotangents.out)
    return SoftmaxInputs(_call(_BACKWARD, arrays, call, inputs, config))
