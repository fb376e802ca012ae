"""Two kernels a step: a symmetric product, launched twice, and a general one, each with what is added in its epilogue.

`A = X X'` and `B = b A + c A A` are symmetric: only tiles with elements on or below the diagonal are computed, half of the work,
and those below it are written on both sides. Each element is summed in float32 and written by one program.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.newton_schulz.interface import NewtonSchulzCall, NewtonSchulzInputs, NewtonSchulzOutputs
from ejkernel.operations.newton_schulz.phases import normalised
from ejkernel_triton._jax_triton import call_kernel, has_scratch
from ejkernel_triton.grouped_matmul.config import SCRATCH, Tile, readable_by_tma
from ejkernel_triton.grouped_matmul.kernel import tile_coordinate
from ejkernel_triton.newton_schulz.config import Config, gram_tiles, update_tiles


@triton.jit
def triangle_coordinate(i_tile, RATIO: tl.constexpr):
    """Row tile and column tile of a number that counts the tiles of the triangle row by row, `RATIO * (i + 1)` in row i."""
    i_pair = i_tile // RATIO
    i_row = ((tl.sqrt(8.0 * i_pair.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    # the root may be one off
    i_row = tl.where(i_row * (i_row + 1) // 2 > i_pair, i_row - 1, i_row)
    i_row = tl.where((i_row + 1) * (i_row + 2) // 2 <= i_pair, i_row + 1, i_row)
    return i_row, i_tile - i_row * (i_row + 1) // 2 * RATIO


@triton.jit
def symmetric_product_kernel(
    p_x,
    p_out,
    p_scratch,
    BATCH: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    ADDED: tl.constexpr,
    TILES: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
):
    """`out = SCALE * x x' + ADDED * x`, of which x is symmetric itself unless ADDED is 0."""
    o_k = tl.arange(0, BLOCK_K)
    if TMA:
        x_left = tl.make_tensor_descriptor(p_x, [BATCH * ROWS, K], [K, 1], [BLOCK_M, BLOCK_K])
        x_right = tl.make_tensor_descriptor(p_x, [BATCH * ROWS, K], [K, 1], [BLOCK_N, BLOCK_K])
    for i_work in tl.range(tl.program_id(0), BATCH * TILES, tl.num_programs(0), flatten=TMA):
        i_batch = i_work // TILES
        i_row, i_column = triangle_coordinate(i_work % TILES, BLOCK_M // BLOCK_N)
        i_row, i_column = i_row * BLOCK_M, i_column * BLOCK_N
        o_row = i_row + tl.arange(0, BLOCK_M)
        o_column = i_column + tl.arange(0, BLOCK_N)
        o_matrix = i_batch.to(tl.int64) * ROWS
        if not TMA:
            # rows beyond the last are those of the last, and not stored
            p_left = p_x + (o_matrix + i_row) * K
            p_right = p_x + (o_matrix + i_column) * K
            o_left = tl.minimum(o_row, ROWS - 1)[:, None] - i_row
            o_right = tl.minimum(o_column, ROWS - 1)[None, :] - i_column
            o_left = o_left * K + o_k[None, :]
            o_right = o_right * K + o_k[:, None]
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i_k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            if TMA:
                b_left = x_left.load([i_batch * ROWS + i_row, i_k])  # [BLOCK_M, BLOCK_K]
                b_right = x_right.load([i_batch * ROWS + i_column, i_k]).trans()  # [BLOCK_K, BLOCK_N]
            else:
                if K % BLOCK_K == 0:
                    b_left = tl.load(p_left + o_left)  # [BLOCK_M, BLOCK_K]
                    b_right = tl.load(p_right + o_right)  # [BLOCK_K, BLOCK_N]
                else:
                    b_left = tl.load(p_left + o_left, mask=(o_k < K - i_k)[None, :], other=0.0)
                    b_right = tl.load(p_right + o_right, mask=(o_k < K - i_k)[:, None], other=0.0)
                p_left += BLOCK_K
                p_right += BLOCK_K
            b_acc = tl.dot(b_left, b_right, b_acc, input_precision=PRECISION)
        if SCALE != 1.0:
            b_acc *= SCALE
        m_tile = (o_row < ROWS)[:, None] & (o_column < ROWS)[None, :]
        if ADDED != 0.0:
            p_added = p_x + (o_matrix + i_row) * K + i_column
            o_added = (o_row - i_row)[:, None] * K + (o_column - i_column)[None, :]
            b_acc += ADDED * tl.load(p_added + o_added, mask=m_tile, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
        b_out = b_acc.to(p_out.dtype.element_ty)
        p_below = p_out + (o_matrix + i_row) * ROWS + i_column
        p_above = p_out + (o_matrix + i_column) * ROWS + i_row
        p_below += (o_row - i_row)[:, None] * ROWS + (o_column - i_column)[None, :]
        p_above += (o_column - i_column)[:, None] * ROWS + (o_row - i_row)[None, :]
        tl.store(p_below, b_out, mask=m_tile)
        # tiles that reach the diagonal hold their own upper half, or the next tile of the row does
        m_above = (o_column < ROWS)[:, None] & (o_row < ROWS)[None, :] & (i_row >= i_column + BLOCK_N)
        tl.store(p_above, tl.trans(b_out), mask=m_above)


@triton.jit
def update_kernel(
    p_left,
    p_x,
    p_out,
    p_scratch,
    BATCH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    L2_SWIZZLE: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
):
    """`out = SCALE * x + left x`, left `[ROWS, ROWS]`."""
    DOWN: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    ACROSS: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    o_k = tl.arange(0, BLOCK_K)
    if TMA:
        left_tiles = tl.make_tensor_descriptor(p_left, [BATCH * ROWS, ROWS], [ROWS, 1], [BLOCK_M, BLOCK_K])
        # three axes: rows beyond a matrix are zeros, not those of the next, which may hold NaN
        x_tiles = tl.make_tensor_descriptor(p_x, [BATCH, ROWS, COLUMNS], [ROWS * COLUMNS, COLUMNS, 1], [1, BLOCK_K, BLOCK_N])
    for i_work in tl.range(tl.program_id(0), BATCH * DOWN * ACROSS, tl.num_programs(0), flatten=TMA):
        i_batch = i_work // (DOWN * ACROSS)
        i_row, i_column = tile_coordinate(i_work % (DOWN * ACROSS), DOWN, ACROSS, L2_SWIZZLE)
        i_row, i_column = i_row * BLOCK_M, i_column * BLOCK_N
        o_row = tl.arange(0, BLOCK_M)
        o_column = i_column + tl.arange(0, BLOCK_N)
        o_matrix = i_batch.to(tl.int64) * ROWS
        if not TMA:
            p_a = p_left + (o_matrix + i_row) * ROWS
            p_b = p_x + o_matrix * COLUMNS
            o_a = tl.minimum(o_row, ROWS - 1 - i_row)[:, None] * ROWS + o_k[None, :]
            o_b = o_k[:, None] * COLUMNS + o_column[None, :]
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i_k in tl.range(0, ROWS, BLOCK_K, num_stages=STAGES):
            if TMA:
                b_left = left_tiles.load([i_batch * ROWS + i_row, i_k])  # [BLOCK_M, BLOCK_K]
                b_x = x_tiles.load([i_batch, i_k, i_column]).reshape(BLOCK_K, BLOCK_N)
            else:
                if ROWS % BLOCK_K == 0:
                    b_left = tl.load(p_a + o_a)  # [BLOCK_M, BLOCK_K]
                else:
                    b_left = tl.load(p_a + o_a, mask=(o_k < ROWS - i_k)[None, :], other=0.0)
                if ROWS % BLOCK_K == 0 and COLUMNS % BLOCK_N == 0:
                    b_x = tl.load(p_b + o_b)  # [BLOCK_K, BLOCK_N]
                else:
                    b_x = tl.load(p_b + o_b, mask=(o_k < ROWS - i_k)[:, None] & (o_column < COLUMNS)[None, :], other=0.0)
                p_a += BLOCK_K
                p_b += BLOCK_K * COLUMNS
            b_acc = tl.dot(b_left, b_x, b_acc, input_precision=PRECISION)
        m_tile = (o_row < ROWS - i_row)[:, None] & (o_column < COLUMNS)[None, :]
        o_first = (o_matrix + i_row) * COLUMNS
        o_tile = o_row[:, None] * COLUMNS + o_column[None, :]
        b_acc += SCALE * tl.load(p_x + o_first + o_tile, mask=m_tile, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
        tl.store(p_out + o_first + o_tile, b_acc.to(p_out.dtype.element_ty), mask=m_tile)


def _launch(kernel: Any, arrays: tuple[Any, ...], shape: tuple[int, ...], tile: Tile, units: int, **constants: Any) -> Any:
    """One program for each of `units` tiles, or as many as the config says, with scratch memory for two TMA descriptors each."""
    tma = tile.tma and has_scratch() and all(readable_by_tma(array.shape[-1], array.dtype) for array in arrays)
    programs = min(units, tile.programs or units)
    out, _ = call_kernel(
        kernel,
        arrays,
        ((shape, arrays[0].dtype), ((programs * SCRATCH if tma else 1,), jnp.uint8)),
        grid=programs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        BATCH=shape[0],
        ROWS=shape[1],
        PRECISION="ieee",
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        STAGES=tile.num_stages,
        TMA=tma,
        **constants,
    )
    return out


def symmetric_product(x: Any, tile: Tile, scale: float = 1.0, added: float = 0.0) -> Any:
    """`scale * x x' + added * x` of matrices `[b, m, k]`, in their dtype."""
    batch, rows, inner = x.shape
    tiles = gram_tiles(rows, tile)
    constants = {"K": inner, "SCALE": scale, "ADDED": added, "TILES": tiles}
    return _launch(symmetric_product_kernel, (x,), (batch, rows, rows), tile, batch * tiles, **constants)


def updated(left: Any, x: Any, tile: Tile, scale: float) -> Any:
    """`scale * x + left x`, in their dtype."""
    batch, rows, columns = x.shape
    units = batch * update_tiles(rows, columns, tile)
    constants = {"COLUMNS": columns, "SCALE": scale, "L2_SWIZZLE": tile.l2_swizzle}
    return _launch(update_kernel, (left, x), x.shape, tile, units, **constants)


def forward(call: NewtonSchulzCall, inputs: NewtonSchulzInputs, config: Config) -> NewtonSchulzOutputs:
    x = normalised(call, inputs.x)
    for a, b, c in call.coefficients if x.size else ():
        gram = symmetric_product(x, config.gram)
        polynomial = symmetric_product(gram, config.gram, c, b)
        x = updated(polynomial, x, config.update, a)
    return NewtonSchulzOutputs(x.astype(call.x.dtype))
