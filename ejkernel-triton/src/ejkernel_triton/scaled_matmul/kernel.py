"""A product of int8 or float8 tiles, whose sums are scaled before they leave the registers; gradients of scales form it again.

Hopper's float8 units keep 14 bits of a sum, which `precision="default"` allows. Else float8 is multiplied in float16.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
from typing import Any, NamedTuple

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.scaled_matmul.interface import ScaledMatmulCall, ScaledMatmulInputs, ScaledMatmulOutputs
from ejkernel.plugin import current_target
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.grouped_matmul.kernel import tile_coordinate
from ejkernel_triton.scaled_matmul.config import Config, product_of, programs, widens


@triton.jit
def coordinate_of(rows, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, L2_SWIZZLE: tl.constexpr):
    """Member, row tile and column tile of a program, and how many row tiles there are."""
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles = tl.cdiv(rows, BLOCK_M)
    i_member = tl.program_id(0) // (tiles * COLUMNS)
    i_m, i_n = tile_coordinate(tl.program_id(0) % (tiles * COLUMNS), tiles, COLUMNS, L2_SWIZZLE)
    return i_member.to(tl.int64), i_m, i_n, tiles


@triton.jit
def in_float16(b_values):
    """Float8 as it is. float8_e5m2 is the upper half of a float16, which Triton converts to only from 8.9 on."""
    if b_values.dtype == tl.float8e5:
        return (b_values.to(tl.uint8, bitcast=True).to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    else:
        return b_values.to(tl.float16)


@triton.jit
def load_tile(p_tile, m_tile, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(p_tile, mask=m_tile, other=0.0)
    else:
        return tl.load(p_tile)


@triton.jit
def unscaled_tile(
    p_lhs,
    p_rhs,
    rows,
    i_member,
    i_m,
    i_n,
    K: tl.constexpr,
    N: tl.constexpr,
    MATRICES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FLOAT8: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`lhs . rhs` in float32. [BLOCK_M, BLOCK_N]"""
    MASKED: tl.constexpr = K % BLOCK_K != 0
    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    p_lhs += (i_member * rows + i_m * BLOCK_M) * K
    p_rhs += i_member * N * K if MATRICES > 1 else 0
    # rows beyond the last are those of the last, and not stored
    o_lhs = tl.minimum(o_m, rows - i_m * BLOCK_M - 1)[:, None] * K + o_k[None, :]
    if TRANSPOSED:
        p_rhs += i_n.to(tl.int64) * BLOCK_N * K
        o_rhs = o_k[:, None] + tl.minimum(o_n, N - i_n * BLOCK_N - 1)[None, :] * K
    else:
        p_rhs += i_n * BLOCK_N
        o_rhs = o_k[:, None] * N + o_n[None, :]
        m_n = (i_n * BLOCK_N + o_n < N)[None, :]
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32 if FLOAT8 else tl.int32)
    for i_k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        m_k = o_k < K - i_k
        b_lhs = load_tile(p_lhs + o_lhs, m_k[None, :], MASKED)  # [BLOCK_M, BLOCK_K]
        if TRANSPOSED:
            b_rhs = load_tile(p_rhs + o_rhs, m_k[:, None], MASKED)  # [BLOCK_K, BLOCK_N]
        else:
            b_rhs = tl.load(p_rhs + o_rhs, mask=(m_k[:, None] & m_n) if MASKED else m_n, other=0.0)
        if WIDEN:
            b_lhs, b_rhs = in_float16(b_lhs), in_float16(b_rhs)
        b_acc = tl.dot(b_lhs, b_rhs, b_acc, out_dtype=b_acc.dtype)
        p_lhs += BLOCK_K
        p_rhs += BLOCK_K if TRANSPOSED else BLOCK_K * N
    return b_acc.to(tl.float32)


@triton.jit
def load_scales(p_scale, i_first, o_scale, m_scale, SCALES: tl.constexpr):
    """One number, or one for each row or column of a tile. [1] or [BLOCK]"""
    if SCALES:
        return tl.load(p_scale + i_first + o_scale, mask=m_scale, other=0.0).to(tl.float32)
    else:
        return tl.load(p_scale + tl.arange(0, 1)).to(tl.float32)


@triton.jit
def scaled_matmul_kernel(
    p_lhs,
    p_rhs,
    p_lhs_scale,
    p_rhs_scale,
    rows,
    p_out,
    K: tl.constexpr,
    N: tl.constexpr,
    MATRICES: tl.constexpr,
    LHS_SCALES: tl.constexpr,
    RHS_SCALES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FLOAT8: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    L2_SWIZZLE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """LHS_SCALES: 1 for one of each row, 0 for one number; RHS_SCALES: rows of column scales, 0 for one number."""
    i_member, i_m, i_n, _ = coordinate_of(rows, N, BLOCK_M, BLOCK_N, L2_SWIZZLE)
    b_acc = unscaled_tile(
        p_lhs, p_rhs, rows, i_member, i_m, i_n,
        K, N, MATRICES, TRANSPOSED, FLOAT8, WIDEN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m, m_n = o_m < rows, o_n < N
    b_lhs_scale = load_scales(p_lhs_scale, i_member * rows, o_m, m_m, LHS_SCALES)
    b_rhs_scale = load_scales(p_rhs_scale, i_member * N if RHS_SCALES > 1 else 0, o_n, m_n, RHS_SCALES)
    b_out = b_acc * b_lhs_scale[:, None] * b_rhs_scale[None, :]
    p_tile = p_out + (i_member * rows + o_m)[:, None] * N + o_n[None, :]
    tl.store(p_tile, b_out.to(p_out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def scale_gradient_kernel(
    p_lhs,
    p_rhs,
    p_lhs_scale,
    p_rhs_scale,
    p_grad,
    rows,
    p_by_row,
    p_by_column,
    K: tl.constexpr,
    N: tl.constexpr,
    MATRICES: tl.constexpr,
    LHS_SCALES: tl.constexpr,
    RHS_SCALES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FLOAT8: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    L2_SWIZZLE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums over a tile's columns for each of its rows, `[members, column tiles, rows]`, and the reverse."""
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    i_member, i_m, i_n, tiles = coordinate_of(rows, N, BLOCK_M, BLOCK_N, L2_SWIZZLE)
    b_acc = unscaled_tile(
        p_lhs, p_rhs, rows, i_member, i_m, i_n,
        K, N, MATRICES, TRANSPOSED, FLOAT8, WIDEN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m, m_n = o_m < rows, o_n < N
    m_tile = m_m[:, None] & m_n[None, :]
    b_lhs_scale = load_scales(p_lhs_scale, i_member * rows, o_m, m_m, LHS_SCALES)
    b_rhs_scale = load_scales(p_rhs_scale, i_member * N if RHS_SCALES > 1 else 0, o_n, m_n, RHS_SCALES)
    p_tile = p_grad + (i_member * rows + o_m)[:, None] * N + o_n[None, :]
    b_weighted = b_acc * tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)
    b_weighted = tl.where(m_tile, b_weighted, 0.0)  # what is not stored may be NaN
    b_by_row = tl.sum(b_weighted * b_rhs_scale[None, :], axis=1)
    b_by_column = tl.sum(b_weighted * b_lhs_scale[:, None], axis=0)
    tl.store(p_by_row + (i_member * COLUMNS + i_n) * rows + o_m, b_by_row, mask=m_m)
    tl.store(p_by_column + (i_member * tiles + i_m) * N + o_n, b_by_column, mask=m_n)


class _Launch(NamedTuple):
    """What both kernels are called with: members, rows of each, arrays in the order of parameters, and constants."""

    members: int
    rows: int
    arrays: tuple[Any, ...]
    options: dict[str, Any]


def _launch(call: ScaledMatmulCall, inputs: ScaledMatmulInputs, config: Config) -> _Launch:
    batch, rows, inner = call.lhs.shape
    columns = call.columns
    lhs, rhs, lhs_scale, rhs_scale = inputs
    members, height = product_of(call)
    transposed = call.transpose_rhs
    if config.transpose_first and not transposed:
        rhs, transposed = jnp.swapaxes(rhs, 1, 2), True
    if lhs_scale.size > 1:
        lhs_scale = jnp.broadcast_to(lhs_scale, (batch, rows))
    if rhs_scale.size > 1:
        rhs_scale = jnp.broadcast_to(rhs_scale, (rhs_scale.shape[0], columns))
    options = {
        "grid": programs(members, height, columns, config.block_m, config.block_n),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "K": inner,
        "N": columns,
        "MATRICES": rhs.shape[0],
        "LHS_SCALES": 1 if lhs_scale.size > 1 else 0,
        "RHS_SCALES": rhs_scale.shape[0] if rhs_scale.size > 1 else 0,
        "TRANSPOSED": transposed,
        "FLOAT8": call.in_float8,
        "WIDEN": widens(call, current_target()),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "L2_SWIZZLE": config.l2_swizzle,
        "STAGES": config.num_stages,
    }
    return _Launch(members, height, (lhs, rhs, lhs_scale, rhs_scale), options)


def forward(call: ScaledMatmulCall, inputs: ScaledMatmulInputs, config: Config) -> ScaledMatmulOutputs:
    shape = (*call.lhs.shape[:2], call.columns)
    if 0 in shape or not call.lhs.size:
        product = jnp.zeros(shape, jnp.float32)
        lhs_scale, rhs_scale = (scale.astype(jnp.float32) for scale in (inputs.lhs_scale, inputs.rhs_scale))
        return ScaledMatmulOutputs((product * lhs_scale[:, :, None] * rhs_scale[:, None, :]).astype(call.out_dtype))
    launch = _launch(call, inputs, config)
    (out,) = call_kernel(scaled_matmul_kernel, (*launch.arrays, launch.rows), ((shape, call.out_dtype),), **launch.options)
    return ScaledMatmulOutputs(out)


def backward(
    call: ScaledMatmulCall,
    inputs: ScaledMatmulInputs,
    outputs: ScaledMatmulOutputs,
    cotangents: ScaledMatmulOutputs,
    config: Config,
) -> ScaledMatmulInputs:
    """Those of the scales; a program that does not use them does not form the product again."""
    if 0 in cotangents.out.shape or not call.lhs.size:
        return ScaledMatmulInputs(None, None, jnp.zeros_like(inputs.lhs_scale), jnp.zeros_like(inputs.rhs_scale))
    launch = _launch(call, inputs, config)
    across, down = -(-call.columns // config.block_n), -(-launch.rows // config.block_m)
    by_row, by_column = call_kernel(
        scale_gradient_kernel,
        (*launch.arrays, cotangents.out, launch.rows),
        (
            ((launch.members, across, launch.rows), jnp.float32),
            ((launch.members, down, call.columns), jnp.float32),
        ),
        **launch.options,
    )
    by_row = jnp.sum(by_row, axis=1).reshape(call.lhs.shape[:2])
    return ScaledMatmulInputs(
        None, None, _shared(by_row, inputs.lhs_scale), _shared(jnp.sum(by_column, axis=1), inputs.rhs_scale)
    )


def _shared(gradient: Any, scale: Any) -> Any:
    """Summed over what shares a scale."""
    axes = tuple(axis for axis in (0, 1) if scale.shape[axis] != gradient.shape[axis])
    return jnp.sum(gradient, axis=axes, keepdims=True).reshape(scale.shape).astype(scale.dtype)
