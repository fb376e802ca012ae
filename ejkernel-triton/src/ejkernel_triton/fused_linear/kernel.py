"""Two kernels that read a weight once, at the device's bandwidth: with FMAs for the fewest rows, else with tensor cores.

A program has some rows of the weight, with an activation as many of the gate and of up, and all rows of x. Sums of squares are
formed of the same loads of x as the product, which is divided by the root afterwards: `norm(x) w = rstd * (x * scale) w`. So no
kernel runs before this one, and its first loads wait for nothing.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.common.rows.interface import square_unit
from ejkernel.operations.fused_linear.interface import FusedLinearCall, FusedLinearInputs, FusedLinearOutputs
from ejkernel.operations.gated_linear_unit.interface import ACTIVATIONS
from ejkernel_triton._blocks import dot_block
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.fused_linear import parts
from ejkernel_triton.fused_linear.capability import in_one_kernel, rows_of
from ejkernel_triton.fused_linear.config import Config, vector_of
from ejkernel_triton.gated_linear_unit.kernel import activated


@triton.jit
def tile_of(COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The batch, and the first column of the result."""
    TILES: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    return (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES * BLOCK_N


@triton.jit
def inverse_rms(b_squares, K: tl.constexpr, EPSILON: tl.constexpr, UNIT: tl.constexpr):
    """Of sums of squares of rows that were multiplied by UNIT."""
    return UNIT * tl.rsqrt(b_squares / K + EPSILON * UNIT * UNIT)


@triton.jit
def finished(
    b_out,
    b_up,
    p_bias,
    p_residual,
    o_n,
    o_out,
    m_n,
    m_out,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Products of the gate and of up, or of all where there is no activation, with what follows them; o_n and m_n are shaped to
    broadcast against these."""
    if BIAS:
        b_out += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    if ACTIVATION >= 0:
        if BIAS:
            b_up += tl.load(p_bias + COLUMNS + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_value, _ = activated(b_out, ACTIVATION, 1.0)
        b_out = b_value * b_up
    if RESIDUAL:
        b_out += tl.load(p_residual + o_out, mask=m_out, other=0.0).to(tl.float32)
    return b_out


@triton.jit
def load_weight(p_weight, o_weight, m_k, MASKED: tl.constexpr):
    """Not kept in L1, where x and the scale are. [BLOCK_K / VECTOR, BLOCK_N, VECTOR] in float32"""
    if MASKED:
        b_weight = tl.load(p_weight + o_weight, mask=m_k[:, None, :], other=0.0, cache_modifier=".cg")
    else:
        b_weight = tl.load(p_weight + o_weight, cache_modifier=".cg")
    return b_weight.to(tl.float32)


@triton.jit
def four_sums(b_rows, FIRST: tl.constexpr):
    """Sums over the first axis of four entries from FIRST on, the last one again where there are fewer. Reduced side by side, they
    meet once in shared memory."""
    LAST: tl.constexpr = len(b_rows) - 1
    if LAST == 0:
        b_sum = tl.sum(b_rows[0], axis=0)
        return b_sum, b_sum, b_sum, b_sum
    else:
        b_even = tl.join(b_rows[FIRST], b_rows[min(FIRST + 2, LAST)])
        b_odd = tl.join(b_rows[min(FIRST + 1, LAST)], b_rows[min(FIRST + 3, LAST)])
        b_even, b_odd = tl.split(tl.sum(tl.join(b_even, b_odd), axis=0))
        b_0, b_2 = tl.split(b_even)
        b_1, b_3 = tl.split(b_odd)
        return b_0, b_1, b_2, b_3


@triton.jit
def vector_kernel(
    p_x,
    p_weight,
    p_scale,
    p_bias,
    p_residual,
    p_out,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    WEIGHT_BATCH: tl.constexpr,
    SCALE_BATCH: tl.constexpr,
    BIAS_BATCH: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EPSILON: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    UNIT: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sums of VECTOR inputs at a time, which a thread loads in 16 bytes. Inputs are the first axis of tiles, and so spread over all
    threads: those of x and of the scale are where those of the weight are."""
    MASKED: tl.constexpr = K % BLOCK_K != 0
    i_batch, i_n = tile_of(COLUMNS, BLOCK_N)
    o_n = i_n + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    p_x += i_batch * ROWS * K
    p_scale += i_batch * SCALE_BATCH
    p_bias += i_batch * BIAS_BATCH
    p_gate = p_weight + i_batch * WEIGHT_BATCH + i_n.to(tl.int64) * K
    p_up = p_gate + tl.cast(COLUMNS, tl.int64) * K
    # rows beyond the last are those of the last, and not stored
    o_weight = (tl.minimum(o_n, COLUMNS - 1) - i_n)[None, :, None] * K + o_k[:, None, :]
    b_gates, b_ups, b_squares = (), (), ()
    for _ in tl.static_range(ROWS):
        b_gates += (tl.zeros([BLOCK_K // VECTOR, BLOCK_N], tl.float32),)
        b_ups += (tl.zeros([BLOCK_K // VECTOR, BLOCK_N], tl.float32),)
        b_squares += (tl.zeros([BLOCK_K // VECTOR, 1], tl.float32),)
    for i_k in range(0, K, BLOCK_K):
        m_k = o_k < K - i_k
        b_gate_weight = load_weight(p_gate + i_k, o_weight, m_k, MASKED)
        if ACTIVATION >= 0:
            b_up_weight = load_weight(p_up + i_k, o_weight, m_k, MASKED)
        if NORM:
            b_scale = (
                tl.load(p_scale + i_k + o_k, mask=m_k, other=0.0).to(tl.float32) + SCALE_OFFSET
            )  # [BLOCK_K / VECTOR, VECTOR]
        b_next_gates, b_next_ups, b_next_squares = (), (), ()
        for i_m in tl.static_range(ROWS):
            b_x = tl.load(p_x + i_m * K + i_k + o_k, mask=m_k, other=0.0).to(tl.float32)  # [BLOCK_K / VECTOR, VECTOR]
            b_square = b_squares[i_m]
            if NORM:
                b_small = b_x * UNIT
                b_square += tl.sum(b_small * b_small, axis=1, keep_dims=True)
                b_x *= b_scale
            b_next_squares += (b_square,)
            b_next_gates += (b_gates[i_m] + tl.sum(b_gate_weight * b_x[:, None, :], axis=2),)
            if ACTIVATION >= 0:
                b_next_ups += (b_ups[i_m] + tl.sum(b_up_weight * b_x[:, None, :], axis=2),)
            else:
                b_next_ups += (b_ups[i_m],)
        b_gates, b_ups, b_squares = b_next_gates, b_next_ups, b_next_squares
    m_n = o_n < COLUMNS
    for i_first in tl.static_range(0, ROWS, 4):
        b_outs = four_sums(b_gates, i_first)  # [BLOCK_N] each
        b_up_outs = b_outs
        if ACTIVATION >= 0:
            b_up_outs = four_sums(b_ups, i_first)
        if NORM:
            b_square_sums = four_sums(b_squares, i_first)  # [1] each
        for i_next in tl.static_range(min(4, ROWS - i_first)):
            b_out, b_up = b_outs[i_next], b_up_outs[i_next]
            if NORM:
                b_rstd = inverse_rms(b_square_sums[i_next], K, EPSILON, UNIT)
                b_out *= b_rstd
                b_up *= b_rstd
            o_out = (i_batch * ROWS + i_first + i_next) * COLUMNS + o_n
            b_out = finished(b_out, b_up, p_bias, p_residual, o_n, o_out, m_n, m_n, COLUMNS, ACTIVATION, BIAS, RESIDUAL)
            tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_n)


@triton.jit
def load_tile(p_tile, o_tile, m_k, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(p_tile + o_tile, mask=m_k, other=0.0)
    else:
        return tl.load(p_tile + o_tile)


@triton.jit
def mma_kernel(
    p_x,
    p_weight,
    p_scale,
    p_bias,
    p_residual,
    p_out,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    WEIGHT_BATCH: tl.constexpr,
    SCALE_BATCH: tl.constexpr,
    BIAS_BATCH: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EPSILON: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`out' = weight x'`: rows of the weight are those of MMAs, rows of x, padded, their columns."""
    MASKED: tl.constexpr = K % BLOCK_K != 0
    # in float16 x * scale may overflow where norm(x) does not
    ROOT_FIRST: tl.constexpr = NORM and p_x.dtype.element_ty == tl.float16
    i_batch, i_n = tile_of(COLUMNS, BLOCK_N)
    o_n = i_n + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    p_x += i_batch * ROWS * K
    p_scale += i_batch * SCALE_BATCH
    p_bias += i_batch * BIAS_BATCH
    p_gate = p_weight + i_batch * WEIGHT_BATCH + i_n.to(tl.int64) * K
    p_up = p_gate + tl.cast(COLUMNS, tl.int64) * K
    # rows beyond the last are those of the last, and not stored
    o_weight = (tl.minimum(o_n, COLUMNS - 1) - i_n)[:, None] * K + o_k[None, :]
    o_x = o_k[:, None] + tl.minimum(o_m, ROWS - 1)[None, :] * K
    b_squares = tl.zeros([BLOCK_M], tl.float32)
    if ROOT_FIRST:
        for i_k in tl.range(0, K, BLOCK_K):
            b_small = load_tile(p_x + i_k, o_x, (o_k < K - i_k)[:, None], MASKED).to(tl.float32) * UNIT  # [BLOCK_K, BLOCK_M]
            b_squares += tl.sum(b_small * b_small, axis=0)
        b_rstd = inverse_rms(b_squares, K, EPSILON, UNIT)
    b_gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    b_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for i_k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        m_k = o_k < K - i_k
        b_gate_weight = load_tile(p_gate + i_k, o_weight, m_k[None, :], MASKED)  # [BLOCK_N, BLOCK_K]
        b_x = load_tile(p_x + i_k, o_x, m_k[:, None], MASKED)  # [BLOCK_K, BLOCK_M]
        if NORM:
            b_scale = load_tile(p_scale + i_k, o_k, m_k, MASKED).to(tl.float32) + SCALE_OFFSET  # [BLOCK_K]
            b_wide = b_x.to(tl.float32)
            if ROOT_FIRST:
                b_x = (b_wide * b_rstd[None, :] * b_scale[:, None]).to(b_x.dtype)
            else:
                b_small = b_wide * UNIT
                b_squares += tl.sum(b_small * b_small, axis=0)
                b_x = (b_wide * b_scale[:, None]).to(b_x.dtype)
        b_gate = tl.dot(b_gate_weight, b_x, b_gate, input_precision="ieee")
        if ACTIVATION >= 0:
            b_up_weight = load_tile(p_up + i_k, o_weight, m_k[None, :], MASKED)  # [BLOCK_N, BLOCK_K]
            b_up = tl.dot(b_up_weight, b_x, b_up, input_precision="ieee")
    if NORM and not ROOT_FIRST:
        b_rstd = inverse_rms(b_squares, K, EPSILON, UNIT)
        b_gate *= b_rstd[None, :]
        b_up *= b_rstd[None, :]
    m_n = (o_n < COLUMNS)[:, None]
    m_out = m_n & (o_m < ROWS)[None, :]
    o_out = (i_batch * ROWS + o_m)[None, :] * COLUMNS + o_n[:, None]
    b_out = finished(b_gate, b_up, p_bias, p_residual, o_n[:, None], o_out, m_n, m_out, COLUMNS, ACTIVATION, BIAS, RESIDUAL)
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_out)


def _batch_stride(array: Any) -> int:
    """Elements from one of a batch to the next; 0 where all share one."""
    return 0 if array is None or array.shape[0] == 1 else array[0].size


def forward(call: FusedLinearCall, inputs: FusedLinearInputs, config: Config) -> FusedLinearOutputs:
    shape = (*call.x.shape[:2], call.columns)
    x, weight, scale, bias, residual = inputs
    if 0 in shape:
        return FusedLinearOutputs(jnp.zeros(shape, x.dtype))
    if not in_one_kernel(call):
        return parts.forward(call, inputs)
    batch, rows = rows_of(call)
    inner = call.x.shape[2]
    constants: dict[str, Any] = {
        "ROWS": rows,
        "K": inner,
        "COLUMNS": call.columns,
        "WEIGHT_BATCH": _batch_stride(weight),
        "SCALE_BATCH": _batch_stride(scale),
        "BIAS_BATCH": _batch_stride(bias),
        "NORM": scale is not None,
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
        "ACTIVATION": -1 if call.activation is None else ACTIVATIONS.index(call.activation),
        "EPSILON": call.epsilon,
        "SCALE_OFFSET": call.scale_offset,
        "UNIT": square_unit(x.dtype, call.epsilon),
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
    }
    if config.mma:
        constants |= {"BLOCK_M": dot_block(rows), "STAGES": config.num_stages}
    else:
        constants |= {"VECTOR": min(vector_of(call), config.block_k)}
    (out,) = call_kernel(
        mma_kernel if config.mma else vector_kernel,
        (x, weight, *(x if one is None else one for one in (scale, bias, residual))),
        ((shape, x.dtype),),
        grid=batch * -(-call.columns // config.block_n),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **constants,
    )
    return FusedLinearOutputs(out)


backward = parts.backward
