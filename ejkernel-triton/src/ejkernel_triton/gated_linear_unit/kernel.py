"""Elementwise: each array is read or written once, 16 bytes per thread; backward writes both gradients.

Separate arrays are one vector. The halves of packed rows are cut row by row.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.gated_linear_unit.interface import (
    ACTIVATIONS,
    GatedLinearUnitCall,
    GatedLinearUnitInputs,
    GatedLinearUnitOutputs,
)
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.gated_linear_unit.config import Config


@triton.jit
def _product(b_x, b_share):
    """`x * share`, 0 where the share is, be x infinite."""
    return tl.where(b_share == 0.0, 0.0, b_x * b_share)


@triton.jit
def activated(b_x, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    """The activation and its derivative; ACTIVATION is a place in `ACTIVATIONS`."""
    if ACTIVATION == 3:  # relu
        b_value = tl.where(b_x <= 0.0, 0.0, b_x)
        b_slope = tl.where(b_x > 0.0, 1.0, tl.where(b_x == b_x, 0.0, b_x))
    elif ACTIVATION == 4:  # sigmoid
        b_value = tl.sigmoid(b_x)
        b_slope = b_value * (1.0 - b_value)
    else:
        if ACTIVATION == 0:  # silu
            b_share = tl.sigmoid(b_x * ALPHA)
            b_rise = b_share * (1.0 - b_share) * ALPHA
        elif ACTIVATION == 1:  # gelu
            b_share = 0.5 + 0.5 * tl.erf(b_x * 0.7071067811865476)
            b_rise = tl.exp(-0.5 * b_x * b_x) * 0.3989422804014327
        else:  # gelu_tanh; twice the square root of 2 / pi
            b_square = b_x * b_x
            b_share = tl.sigmoid(1.5957691216057308 * b_x * (1.0 + 0.044715 * b_square))
            b_rise = _product(1.5957691216057308 * (1.0 + 0.134145 * b_square), b_share * (1.0 - b_share))
        b_value = _product(b_x, b_share)
        b_slope = b_share + _product(b_x, b_rise)
    return b_value, b_slope


@triton.jit
def _offsets(ELEMENTS, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """Of the result, of the gate, and of up beside it; and which are there."""
    if PACKED:
        COLUMNS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
        i_row = (tl.program_id(0) // COLUMNS).to(tl.int64)
        o_column = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)
        return i_row * WIDTH + o_column, i_row * 2 * WIDTH + o_column, o_column < WIDTH
    else:
        o_out = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        return o_out, o_out, o_out < ELEMENTS


@triton.jit
def _limited(b_gate, b_up, LIMIT: tl.constexpr):
    if LIMIT >= 0:
        b_gate = tl.minimum(b_gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        b_up = tl.minimum(b_up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        b_up = tl.maximum(b_up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return b_gate, b_up


@triton.jit
def gated_linear_unit_forward_kernel(
    p_gate,
    p_up,
    p_out,
    ELEMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
):
    o_out, o_gate, m_out = _offsets(ELEMENTS, WIDTH, BLOCK, PACKED)
    if PACKED:
        p_up += WIDTH
    b_gate = tl.load(p_gate + o_gate, mask=m_out, other=0.0).to(tl.float32)  # [BLOCK]
    b_up = tl.load(p_up + o_gate, mask=m_out, other=0.0).to(tl.float32)  # [BLOCK]
    b_gate, b_up = _limited(b_gate, b_up, LIMIT)
    b_value, _ = activated(b_gate, ACTIVATION, ALPHA)
    tl.store(p_out + o_out, (b_value * (b_up + UP_OFFSET)).to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def gated_linear_unit_backward_kernel(
    p_gate,
    p_up,
    p_grad,
    p_dgate,
    p_dup,
    ELEMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
):
    o_out, o_gate, m_out = _offsets(ELEMENTS, WIDTH, BLOCK, PACKED)
    if PACKED:
        p_up += WIDTH
        p_dup = p_dgate + WIDTH
    b_stored_gate = tl.load(p_gate + o_gate, mask=m_out, other=0.0).to(tl.float32)  # [BLOCK]
    b_stored_up = tl.load(p_up + o_gate, mask=m_out, other=0.0).to(tl.float32)  # [BLOCK]
    b_grad = tl.load(p_grad + o_out, mask=m_out, other=0.0).to(tl.float32)  # [BLOCK]
    b_gate, b_up = _limited(b_stored_gate, b_stored_up, LIMIT)
    b_value, b_slope = activated(b_gate, ACTIVATION, ALPHA)
    b_dgate = b_grad * (b_up + UP_OFFSET) * b_slope
    b_dup = b_grad * b_value
    if LIMIT >= 0:
        b_dgate = tl.where(b_stored_gate > LIMIT, 0.0, b_dgate)
        b_dup = tl.where(tl.abs(b_stored_up) > LIMIT, 0.0, b_dup)
    tl.store(p_dgate + o_gate, b_dgate.to(p_dgate.dtype.element_ty), mask=m_out)
    tl.store(p_dup + o_gate, b_dup.to(p_dgate.dtype.element_ty), mask=m_out)


def _launch(call: GatedLinearUnitCall, config: Config) -> dict[str, Any]:
    packed = call.up is None
    elements = call.gate.size // (2 if packed else 1)
    rows = elements // max(call.width, 1)
    return {
        "grid": rows * -(-call.width // config.block) if packed else -(-elements // config.block),
        "num_warps": config.num_warps,
        "ELEMENTS": elements,
        "WIDTH": call.width,
        "BLOCK": config.block,
        "PACKED": packed,
        "ACTIVATION": ACTIVATIONS.index(call.activation),
        "ALPHA": call.alpha,
        "LIMIT": -1.0 if call.limit is None else call.limit,
        "UP_OFFSET": call.up_offset,
    }


def forward(call: GatedLinearUnitCall, inputs: GatedLinearUnitInputs, config: Config) -> GatedLinearUnitOutputs:
    shape, dtype = (*call.gate.shape[:-1], call.width), call.gate.dtype
    if not call.gate.size:
        return GatedLinearUnitOutputs(jnp.zeros(shape, dtype))
    up = inputs.gate if inputs.up is None else inputs.up
    (out,) = call_kernel(gated_linear_unit_forward_kernel, (inputs.gate, up), ((shape, dtype),), **_launch(call, config))
    return GatedLinearUnitOutputs(out)


def backward(
    call: GatedLinearUnitCall,
    inputs: GatedLinearUnitInputs,
    outputs: GatedLinearUnitOutputs,
    cotangents: GatedLinearUnitOutputs,
    config: Config,
) -> GatedLinearUnitInputs:
    packed = inputs.up is None
    if not call.gate.size:
        return GatedLinearUnitInputs(*(None if one is None else jnp.zeros_like(one) for one in inputs))
    d_gate, d_up = call_kernel(
        gated_linear_unit_backward_kernel,
        (inputs.gate, inputs.gate if packed else inputs.up, cotangents.out),
        ((call.gate.shape, call.gate.dtype), ((1,) if packed else call.gate.shape, call.gate.dtype)),
        **_launch(call, config),
    )
    return GatedLinearUnitInputs(d_gate, None if packed else d_up)
