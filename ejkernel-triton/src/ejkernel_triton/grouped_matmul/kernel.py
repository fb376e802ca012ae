"""Grouped matmul over row tiles of one matrix each; the gradient of a matrix loops over its rows.

XLA computes the table of tiles on the device from the group sizes (`schedule`). A tile may load rows of the next group; these
are not stored. The gradient of a matrix masks rows of other groups. Each output element is summed by one program in a fixed
order.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.call import has_gradient
from ejkernel.operations.grouped_matmul.interface import GroupedMatmulCall, GroupedMatmulInputs, GroupedMatmulOutputs
from ejkernel.operations.grouped_matmul.phases import (
    backward_by_products,
    backward_of_nothing,
    bounds_of_call,
    forward_of_nothing,
    gradient_like,
    multiplies_nothing,
)
from ejkernel_triton._jax_triton import call_kernel, has_scratch
from ejkernel_triton._numerics import dot_precision
from ejkernel_triton.grouped_matmul.config import SCRATCH, BackwardConfig, Tile, readable_by_tma
from ejkernel_triton.grouped_matmul.schedule import tiles_of


@triton.jit
def tile_coordinate(i_work, tiles, COLUMNS: tl.constexpr, L2_SWIZZLE: tl.constexpr):
    """Row tile and column tile of a work index, in swizzle groups of L2_SWIZZLE row tiles that visit one column tile after the
    other."""
    i_swizzle = i_work // (L2_SWIZZLE * COLUMNS)
    i_within = i_work % (L2_SWIZZLE * COLUMNS)
    height = tl.minimum(tiles - i_swizzle * L2_SWIZZLE, L2_SWIZZLE)
    return i_swizzle * L2_SWIZZLE + i_within % height, i_within // height


@triton.jit
def grouped_matmul_kernel(
    p_lhs,
    p_rhs,
    p_matrix,
    p_low,
    p_high,
    p_count,
    p_scale,
    p_bias,
    rows,
    p_out,
    p_scratch,
    K: tl.constexpr,
    N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    MATRICES: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE: tl.constexpr,
    BIASES: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    L2_SWIZZLE: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
):
    """`out = lhs . rhs * scale + bias` for every row tile.

    MATRICES, SCALES and BIASES count them, 0 for none. Matrices are numbered through the batch; if the batch shares them the
    number wraps around. SCALE is the numbers per matrix. With TMA the loops over tiles and over K are flattened to one
    pipeline, which prefetches the next tile while this one is stored.
    """
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STRIDE_K: tl.constexpr = 1 if TRANSPOSED else N
    STRIDE_N: tl.constexpr = K if TRANSPOSED else 1
    tiles = tl.load(p_count)
    o_row = tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    if TMA:
        lhs_tiles = tl.make_tensor_descriptor(p_lhs, [rows, K], [K, 1], [BLOCK_M, BLOCK_K])
        if TRANSPOSED:
            rhs_tiles = tl.make_tensor_descriptor(p_rhs, [MATRICES, N, K], [N * K, K, 1], [1, BLOCK_N, BLOCK_K])
        else:
            rhs_tiles = tl.make_tensor_descriptor(p_rhs, [MATRICES, K, N], [K * N, N, 1], [1, BLOCK_K, BLOCK_N])
    for i_work in tl.range(tl.program_id(0), tiles * COLUMNS, tl.num_programs(0), flatten=TMA):
        i_tile, i_column = tile_coordinate(i_work, tiles, COLUMNS, L2_SWIZZLE)
        i_matrix = tl.load(p_matrix + i_tile)
        i_low = tl.load(p_low + i_tile)
        i_high = tl.load(p_high + i_tile)
        i_weight = i_matrix % MATRICES
        o_n = i_column * BLOCK_N + tl.arange(0, BLOCK_N)
        if not TMA:
            o_lhs = tl.minimum(o_row, rows - 1 - i_low)[:, None] * K + o_k[None, :]
            o_rhs = o_k[:, None] * STRIDE_K + o_n[None, :] * STRIDE_N
            p_row = p_lhs + i_low.to(tl.int64) * K
            p_weight = p_rhs + i_weight.to(tl.int64) * K * N
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i_k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            if TMA:
                b_lhs = lhs_tiles.load([i_low, i_k])  # [BLOCK_M, BLOCK_K]
                if TRANSPOSED:
                    b_rhs = rhs_tiles.load([i_weight, i_column * BLOCK_N, i_k]).reshape(BLOCK_N, BLOCK_K).trans()
                else:
                    b_rhs = rhs_tiles.load([i_weight, i_k, i_column * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
            else:
                if K % BLOCK_K == 0:
                    b_lhs = tl.load(p_row + o_lhs)  # [BLOCK_M, BLOCK_K]
                else:
                    b_lhs = tl.load(p_row + o_lhs, mask=(o_k < K - i_k)[None, :], other=0.0)
                if K % BLOCK_K == 0 and N % BLOCK_N == 0:
                    b_rhs = tl.load(p_weight + o_rhs)  # [BLOCK_K, BLOCK_N]
                else:
                    b_rhs = tl.load(p_weight + o_rhs, mask=(o_k < K - i_k)[:, None] & (o_n < N)[None, :], other=0.0)
                p_row += BLOCK_K
                p_weight += BLOCK_K * STRIDE_K
            if p_rhs.dtype.element_ty == tl.int8:
                b_rhs = b_rhs.to(tl.float32)
            b_acc = tl.dot(b_lhs, b_rhs.to(p_lhs.dtype.element_ty), b_acc, input_precision=PRECISION)
        if SCALE == 1:
            b_acc *= tl.load(p_scale + i_matrix % SCALES).to(tl.float32)
        elif SCALE > 1:
            b_scale = tl.load(p_scale + (i_matrix % SCALES).to(tl.int64) * N + o_n, mask=o_n < N, other=0.0)
            b_acc *= b_scale.to(tl.float32)[None, :]
        if BIASES > 0:
            b_bias = tl.load(p_bias + (i_matrix % BIASES).to(tl.int64) * N + o_n, mask=o_n < N, other=0.0)
            b_acc += b_bias.to(tl.float32)[None, :]
        p_tile = p_out + i_low.to(tl.int64) * N + o_row[:, None] * N + o_n[None, :]
        tl.store(p_tile, b_acc.to(p_out.dtype.element_ty), mask=(o_row < i_high - i_low)[:, None] & (o_n < N)[None, :])


@triton.jit
def grouped_fill_kernel(
    p_bounds,
    p_existing,
    p_before,
    rows,
    matrices,
    p_out,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXISTING: tl.constexpr,
):
    """Fill rows without a matrix from `existing`, or with zeros."""
    blocks = tl.cdiv(rows, BLOCK_M)
    i_member = tl.program_id(0) // blocks
    i_low = tl.program_id(0) % blocks * BLOCK_M
    p_bounds += i_member * (matrices + 1)
    i_first = tl.load(p_bounds)
    i_last = tl.load(p_bounds + matrices)
    if (i_low < i_first) | (tl.minimum(i_low + BLOCK_M, rows) > i_last):
        o_row = i_low + tl.arange(0, BLOCK_M)
        m_row = (o_row < rows) & ((o_row < i_first) | (o_row >= i_last))
        o_out = (i_member.to(tl.int64) * rows + o_row)[:, None] * N
        for i_n in range(0, N, BLOCK_N):
            o_n = i_n + tl.arange(0, BLOCK_N)
            m_tile = m_row[:, None] & (o_n < N)[None, :]
            if EXISTING:
                b_out = tl.load(p_existing + o_out + o_n[None, :], mask=m_tile, other=0.0)  # [BLOCK_M, BLOCK_N]
            else:
                b_out = tl.zeros([BLOCK_M, BLOCK_N], p_out.dtype.element_ty)
            tl.store(p_out + o_out + o_n[None, :], b_out, mask=m_tile)


@triton.jit
def grouped_outer_kernel(
    p_left,
    p_right,
    p_bounds,
    p_rhs,
    p_scale,
    rows,
    matrices,
    p_out,
    p_partial,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    MEMBERS: tl.constexpr,
    MATRICES: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SAVE: tl.constexpr,
    PARTIAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    L2_SWIZZLE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`out = left' . right * scale` over the rows of each matrix, of all MEMBERS of the batch if they share it.

    Left is lhs and right the cotangent, or the reverse if TRANSPOSED. With PARTIAL the kernel also stores the sums over a tile
    of K of `left' . right * rhs`, from which the scale's gradient is computed. Rows of other groups, which may hold NaN, are
    masked. TMA cannot mask them, and a separate last step for them was slower.
    """
    LEFTS: tl.constexpr = (LEFT + BLOCK_L - 1) // BLOCK_L
    RIGHTS: tl.constexpr = (RIGHT + BLOCK_R - 1) // BLOCK_R
    i_matrix = tl.program_id(0) // (LEFTS * RIGHTS)
    i_left, i_right = tile_coordinate(tl.program_id(0) % (LEFTS * RIGHTS), LEFTS, RIGHTS, L2_SWIZZLE)
    o_m = tl.arange(0, BLOCK_M)
    o_l = i_left * BLOCK_L + tl.arange(0, BLOCK_L)
    o_r = i_right * BLOCK_R + tl.arange(0, BLOCK_R)
    m_l, m_r = o_l < LEFT, o_r < RIGHT
    o_left = o_m[None, :] * LEFT + o_l[:, None]
    o_right = o_m[:, None] * RIGHT + o_r[None, :]
    b_acc = tl.zeros([BLOCK_L, BLOCK_R], tl.float32)
    for i_part in range(MEMBERS):
        i_member = i_matrix // matrices + i_part
        p_bound = p_bounds + i_member * (matrices + 1) + i_matrix % matrices
        i_low = tl.load(p_bound)
        length = tl.load(p_bound + 1) - i_low
        i_first = i_member.to(tl.int64) * rows + i_low
        p_l = p_left + i_first * LEFT
        p_r = p_right + i_first * RIGHT
        for i_m in tl.range(0, length, BLOCK_M, num_stages=STAGES):
            m_m = o_m < length - i_m
            b_left = tl.load(p_l + o_left, mask=m_m[None, :] & m_l[:, None], other=0.0)  # [BLOCK_L, BLOCK_M]
            b_right = tl.load(p_r + o_right, mask=m_m[:, None] & m_r[None, :], other=0.0)  # [BLOCK_M, BLOCK_R]
            b_acc = tl.dot(b_left, b_right, b_acc, input_precision=PRECISION)
            p_l += BLOCK_M * LEFT
            p_r += BLOCK_M * RIGHT
    m_tile = m_l[:, None] & m_r[None, :]
    o_tile = o_l[:, None] * RIGHT + o_r[None, :]
    if PARTIAL:
        p_weight = p_rhs + (i_matrix % MATRICES).to(tl.int64) * LEFT * RIGHT
        b_rhs = tl.load(p_weight + o_tile, mask=m_tile, other=0.0)  # [BLOCK_L, BLOCK_R]
        b_product = b_acc * b_rhs.to(tl.float32).to(p_left.dtype.element_ty).to(tl.float32)
        if TRANSPOSED:
            o_partial = (i_matrix.to(tl.int64) * RIGHTS + i_right) * LEFT
            tl.store(p_partial + o_partial + o_l, tl.sum(b_product, axis=1), mask=m_l)
        else:
            o_partial = (i_matrix.to(tl.int64) * LEFTS + i_left) * RIGHT
            tl.store(p_partial + o_partial + o_r, tl.sum(b_product, axis=0), mask=m_r)
    if SAVE:
        if SCALE == 1:
            b_acc *= tl.load(p_scale + i_matrix % SCALES).to(tl.float32)
        elif SCALE > 1:
            p_own = p_scale + (i_matrix % SCALES).to(tl.int64) * SCALE
            if TRANSPOSED:
                b_acc *= tl.load(p_own + o_l, mask=m_l, other=0.0).to(tl.float32)[:, None]
            else:
                b_acc *= tl.load(p_own + o_r, mask=m_r, other=0.0).to(tl.float32)[None, :]
        p_tile = p_out + i_matrix.to(tl.int64) * LEFT * RIGHT + o_tile
        tl.store(p_tile, b_acc.to(p_out.dtype.element_ty), mask=m_tile)


@triton.jit
def grouped_sum_kernel(
    p_grad,
    p_bounds,
    rows,
    matrices,
    p_out,
    N: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum the rows of each matrix, over all MEMBERS of the batch if they share it."""
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    i_matrix = tl.program_id(0) // COLUMNS
    o_n = tl.program_id(0) % COLUMNS * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)
    b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_member in range(MEMBERS):
        i_row = i_matrix // matrices + i_member
        p_bound = p_bounds + i_row * (matrices + 1) + i_matrix % matrices
        i_low = tl.load(p_bound)
        i_high = tl.load(p_bound + 1)
        for i_m in range(i_low, i_high, BLOCK_M):
            p_tile = p_grad + (i_row.to(tl.int64) * rows + i_m) * N + o_m[:, None] * N + o_n[None, :]
            m_tile = (o_m < i_high - i_m)[:, None] & (o_n < N)[None, :]
            b_sum += tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
    tl.store(p_out + i_matrix.to(tl.int64) * N + o_n, tl.sum(b_sum, axis=0).to(p_out.dtype.element_ty), mask=o_n < N)


def _count(array: Any) -> int:
    """Matrices, or scale or bias rows, of the whole batch; 0 without an array."""
    return 0 if array is None else array.shape[0] * array.shape[1]


def _scratch(programs: int, *, used: bool) -> tuple[tuple[int, ...], Any]:
    """Scratch memory for two TMA descriptors per program."""
    return (programs * SCRATCH if used else 1,), jnp.uint8


def _uses_tma(tile: Tile, *arrays: Any) -> bool:
    """Whether tiles are TMA loads: if the config asks for it and the arrays allow it."""
    return tile.tma and has_scratch() and all(readable_by_tma(array.shape[-1], array.dtype) for array in arrays)


def _programs(units: int, tile: Tile) -> int:
    return max(min(units, tile.programs) if tile.programs else units, 1)


def _product(
    lhs: Any,
    rhs: Any,
    bounds: Any,
    tile: Tile,
    dtype: Any,
    precision: str | None,
    *,
    transposed: bool,
    scale: Any = None,
    bias: Any = None,
    existing: Any = None,
) -> Any:
    """`lhs [b, m, k]` times the matrices of its rows, in `dtype`. lhs has the dtype of the MMA operands."""
    batch, rows, inner = lhs.shape
    columns = rhs.shape[2 if transposed else 3]
    tiles = tiles_of(bounds, rows, tile.block_m)
    programs = _programs(tiles.matrix.shape[0] * -(-columns // tile.block_n), tile)
    tma = lhs.dtype == rhs.dtype and _uses_tma(tile, lhs, rhs)
    out, _ = call_kernel(
        grouped_matmul_kernel,
        (lhs, rhs, *tiles, bounds if scale is None else scale, bounds if bias is None else bias, batch * rows),
        (((batch, rows, columns), dtype), _scratch(programs, used=tma)),
        grid=programs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        K=inner,
        N=columns,
        TRANSPOSED=transposed,
        MATRICES=_count(rhs),
        SCALES=_count(scale),
        SCALE=0 if scale is None else scale.shape[2],
        BIASES=_count(bias),
        PRECISION=dot_precision(precision, lhs.dtype),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        L2_SWIZZLE=tile.l2_swizzle,
        STAGES=tile.num_stages,
        TMA=tma,
    )
    height, width = 16, min(512, triton.next_power_of_2(columns))
    (out,) = call_kernel(
        grouped_fill_kernel,
        (bounds, bounds if existing is None else existing, out, rows, bounds.shape[1] - 1),
        ((out.shape, out.dtype),),
        grid=batch * -(-rows // height),
        num_warps=4,
        input_output_aliases={2: 0},
        N=columns,
        BLOCK_M=height,
        BLOCK_N=width,
        EXISTING=existing is not None,
    )
    return out


def forward(call: GroupedMatmulCall, inputs: GroupedMatmulInputs, config: Tile) -> GroupedMatmulOutputs:
    if multiplies_nothing(call):
        return forward_of_nothing(call, inputs)
    lhs, rhs = inputs.lhs.astype(call.product_dtype), inputs.rhs
    if not lhs.size:  # an empty contraction is one over a single zero
        lhs = jnp.zeros((*lhs.shape[:2], 1), lhs.dtype)
        rhs = jnp.zeros((*rhs.shape[:2], *((call.columns, 1) if call.transpose_rhs else (1, call.columns))), rhs.dtype)
    out = _product(
        lhs,
        rhs,
        bounds_of_call(call, inputs),
        config,
        jnp.dtype(call.preferred_element_type),
        call.precision,
        transposed=call.transpose_rhs,
        scale=inputs.rhs_scale,
        bias=inputs.bias,
        existing=inputs.existing_out,
    )
    return GroupedMatmulOutputs(out)


def backward(
    call: GroupedMatmulCall,
    inputs: GroupedMatmulInputs,
    outputs: GroupedMatmulOutputs,
    cotangents: GroupedMatmulOutputs,
    config: BackwardConfig,
) -> GroupedMatmulInputs:
    grad = cotangents.out
    if multiplies_nothing(call):
        return backward_of_nothing(inputs, grad)
    return backward_by_products(
        call,
        inputs,
        grad,
        of_lhs=lambda bounds, grad, scale: gradient_of_lhs(call, inputs, bounds, grad, scale, config.tile_of_lhs),
        of_matrices=lambda bounds, grad: gradients_of_matrices(call, inputs, bounds, grad, config.tile_of_rhs),
        of_bias=lambda bounds, grad: _row_sums(grad, bounds, inputs.bias),
    )


def gradient_of_lhs(
    call: GroupedMatmulCall, inputs: GroupedMatmulInputs, bounds: Any, grad: Any, scale: Any, tile: Tile
) -> Any:
    return _product(
        grad, inputs.rhs, bounds, tile, inputs.lhs.dtype, call.precision, transposed=not call.transpose_rhs, scale=scale
    )


def gradients_of_matrices(
    call: GroupedMatmulCall, inputs: GroupedMatmulInputs, bounds: Any, grad: Any, tile: Tile
) -> dict[str, Any]:
    """Gradients of rhs and of its scale, `sum of rhs * (lhs' . grad)` over K."""
    rhs, scale, lhs = inputs.rhs, inputs.rhs_scale, inputs.lhs.astype(grad.dtype)
    save = has_gradient(rhs)
    if not save and scale is None:
        return {}
    left, right = (grad, lhs) if call.transpose_rhs else (lhs, grad)
    shared = rhs.shape[0] == 1 and (scale is None or scale.shape[0] == 1)
    members = 1 if shared else lhs.shape[0]
    dtype = rhs.dtype if members == rhs.shape[0] else jnp.float32
    out, partial = outer_products(
        left,
        right,
        bounds,
        tile,
        dtype if save else None,
        call.precision,
        members=members,
        transposed=call.transpose_rhs,
        rhs=rhs,
        scale=scale,
    )
    found = {"rhs": gradient_like(rhs, out)} if save else {}
    if scale is not None:
        found["rhs_scale"] = gradient_like(scale, jnp.sum(partial, axis=2))
    return found


def outer_products(
    left: Any,
    right: Any,
    bounds: Any,
    tile: Tile,
    dtype: Any,
    precision: str | None,
    *,
    members: int,
    transposed: bool = False,
    rhs: Any = None,
    scale: Any = None,
) -> tuple[Any, Any]:
    """`left' . right * scale` over the rows of every matrix, `[members, g, left, right]`, and partial sums of the scale's gradient.

    Args:
        left, right: `[b, m, left]` and `[b, m, right]`, in the dtype of the products.
        bounds: `[b, g + 1]`, as `bounds_of` makes them.
        dtype: of the product; None = only the partial sums.
        members: b, or 1 for sums over the batch.
        transposed, rhs, scale: as in the kernel; without a scale there are no partial sums.
    """
    batch, rows, matrices = *left.shape[:2], bounds.shape[1] - 1
    lefts, rights = -(-left.shape[2] // tile.block_m), -(-right.shape[2] // tile.block_n)
    partials, columns = (rights, left.shape[2]) if transposed else (lefts, right.shape[2])
    out, partial = call_kernel(
        grouped_outer_kernel,
        (left, right, bounds, bounds if rhs is None else rhs, bounds if scale is None else scale, rows, matrices),
        (
            ((1,), jnp.float32) if dtype is None else ((members, matrices, left.shape[2], right.shape[2]), dtype),
            ((1,) if scale is None else (members, matrices, partials, columns), jnp.float32),
        ),
        grid=members * matrices * lefts * rights,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        LEFT=left.shape[2],
        RIGHT=right.shape[2],
        MEMBERS=batch // members,
        MATRICES=matrices if rhs is None else _count(rhs),
        SCALES=_count(scale),
        SCALE=0 if scale is None else scale.shape[2],
        TRANSPOSED=transposed,
        SAVE=dtype is not None,
        PARTIAL=scale is not None,
        PRECISION=dot_precision(precision, left.dtype),
        BLOCK_M=tile.block_k,
        BLOCK_L=tile.block_m,
        BLOCK_R=tile.block_n,
        L2_SWIZZLE=tile.l2_swizzle,
        STAGES=tile.num_stages,
    )
    return out, partial


def _row_sums(grad: Any, bounds: Any, bias: Any) -> Any:
    """The bias's gradient."""
    batch, rows, columns = grad.shape
    block = min(128, max(16, triton.next_power_of_2(columns)))
    (out,) = call_kernel(
        grouped_sum_kernel,
        (grad, bounds, rows, bias.shape[1]),
        ((bias.shape, bias.dtype),),
        grid=_count(bias) * -(-columns // block),
        num_warps=4,
        N=columns,
        MEMBERS=batch // bias.shape[0],
        BLOCK_M=32,
        BLOCK_N=block,
    )
    return out
