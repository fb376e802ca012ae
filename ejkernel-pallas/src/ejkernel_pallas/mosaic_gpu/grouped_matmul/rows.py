"""Rows times the matrix of their group: forward, and with transposed matrices the gradient of lhs.

A persistent, warp-specialised kernel with one block, or cluster, per multiprocessor. A producer warpgroup fills a ring buffer
in shared memory with TMA loads, across tile boundaries; two consumer warpgroups issue wgmmas for half of the tile each, and
store through shared memory while the next tile's operands arrive. Rows of a neighbouring group in a tile are computed and not
stored: rows are independent, so they affect no row that is stored.

Hopper's tensor cores accumulate float8 products with about 14 bits. Accumulation is therefore promoted: each step of 128 along
K has its own accumulator, which CUDA cores add to float32 accumulators while the other warpgroup's wgmmas run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel_pallas.mosaic_gpu._call import call_kernel
from ejkernel_pallas.mosaic_gpu.grouped_matmul import schedule
from ejkernel_pallas.mosaic_gpu.grouped_matmul.config import (
    CONSUMERS,
    MAX_PROMOTED_SUMS,
    PRODUCER_REGISTERS,
    Tile,
    chunk_width,
    depth_of,
)


@dataclasses.dataclass(frozen=True)
class MatmulParams:
    """Static parameters of `[rows, inner] . [inner, columns]`.

    Attributes:
        inner: multiple of `depth`.
        columns: multiple of `DEPTH`.
        depth: of a step.
        matrices, scales, biases: their numbers, 0 for none; if the batch shares them a matrix's number wraps around.
        row_scales: whether rows have scales.
        promotes: whether accumulation is promoted.
        transposed: whether matrices are stored `[columns, inner]`.
        dtype: of the output.
        tile: of the config.
        programs: blocks or clusters of the grid.
    """

    inner: int
    columns: int
    depth: int
    matrices: int
    scales: int
    biases: int
    row_scales: bool
    promotes: bool
    transposed: bool
    dtype: Any
    tile: Tile
    programs: int

    @property
    def steps(self) -> int:
        return self.inner // self.depth

    @property
    def column_tiles(self) -> int:
        """Column tiles."""
        return -(-self.columns // self.tile.block_n)


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """A typed `pl.when`: run the decorated function if the condition holds."""
    return pl.when(condition)


class _TileCoordinate(NamedTuple):
    """Tile coordinate: matrix or -1, first row and column of an output tile, and the rows of its group."""

    matrix: Any
    row: Any
    column: Any
    start: Any
    end: Any


def _tile_coordinate(table: Any, index: Any, params: MatmulParams) -> _TileCoordinate:
    """The tile coordinate of a work index: swizzle groups of row tiles visit one column tile after the other, for L2 reuse."""
    tile = params.tile
    entry = [table[index // params.column_tiles, column] for column in range(6)]
    within = index - entry[schedule.FIRST] * params.column_tiles
    height = entry[schedule.HEIGHT]
    column = within // height
    row = entry[schedule.BASE] + (within - column * height) * tile.height
    if tile.cluster > 1:
        row = row + jax.lax.axis_index("peer") * tile.block_m
    return _TileCoordinate(entry[schedule.MATRIX], row, column * tile.block_n, entry[schedule.START], entry[schedule.END])


def _rows_kernel(lhs: Any, rhs: Any, table: Any, count: Any, *refs: Any, params: MatmulParams, **scratch: Any) -> None:
    *others, out = refs
    scale = others.pop(0) if params.scales else None
    bias = others.pop(0) if params.biases else None
    row_scale = others.pop(0) if params.row_scales else None
    consume = functools.partial(_consume, scale, bias, row_scale, out, params=params, **scratch)
    produce = functools.partial(_produce, lhs, rhs, params=params, **scratch)
    warpgroup, program, programs = jax.lax.axis_index("wg"), jax.lax.axis_index("program"), params.programs
    units = count[0] * params.column_tiles
    mine = (units - program + programs - 1) // programs

    def each(work: Any) -> Any:
        """Fold over the tiles of this block; prefetches the table entry of the next tile."""

        def one(i: Any, carry: tuple[Any, _TileCoordinate]) -> tuple[Any, _TileCoordinate]:
            step, unit = carry
            following = _tile_coordinate(table, jnp.minimum(program + (i + 1) * programs, units - 1), params)
            return work(unit, step), following

        first = _tile_coordinate(table, jnp.minimum(program, units - 1), params)
        return jax.lax.fori_loop(0, mine, one, (jnp.int32(0), first))[0]

    @when(warpgroup == CONSUMERS)
    def _producer() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        _drain(each(produce), scratch["empty"], params)

    @when(warpgroup < CONSUMERS)
    def _consumer() -> None:
        plgpu.set_max_registers(consumer_registers(), action="increase")
        each(functools.partial(consume, warpgroup))
        plgpu.wait_smem_to_gmem(0)


def consumer_registers() -> int:
    """setmaxnreg value of the consumers: the registers that the producer leaves, as a multiple of 8."""
    return (512 - PRODUCER_REGISTERS) // CONSUMERS // 8 * 8


def _produce(
    lhs: Any,
    rhs: Any,
    unit: _TileCoordinate,
    step: Any,
    *,
    params: MatmulParams,
    lhs_tiles: Any,
    rhs_tiles: Any,
    full: Any,
    empty: Any,
    **_: Any,
) -> Any:
    """Issue the TMA loads of one tile's operands."""
    tile = params.tile
    row, column = pl.multiple_of(unit.row, schedule.ROW_ALIGNMENT), pl.multiple_of(unit.column, tile.block_n)
    columns = pl.ds(column, tile.block_n)
    weight = jnp.maximum(unit.matrix, 0) % params.matrices

    def copy(i: Any, step: Any) -> Any:
        slot = step % tile.num_stages
        depth = pl.ds(pl.multiple_of(i * params.depth, params.depth), params.depth)

        @when(step >= tile.num_stages)
        def _wait() -> None:
            plgpu.barrier_wait(empty.at[slot])

        plgpu.copy_gmem_to_smem(lhs.at[pl.ds(row, tile.block_m), depth], lhs_tiles.at[slot], full.at[slot])
        plgpu.copy_gmem_to_smem(
            rhs.at[weight, columns, depth] if params.transposed else rhs.at[weight, depth, columns],
            rhs_tiles.at[slot],
            full.at[slot],
            collective_axes="peer" if tile.cluster > 1 else None,
        )
        return step + 1

    return jax.lax.fori_loop(0, jnp.where(unit.matrix < 0, 0, params.steps), copy, step)


def _drain(step: Any, empty: Any, params: MatmulParams) -> None:
    """Wait for the last arrivals on every slot: a block must not exit while a cluster peer still signals it."""

    def wait(i: Any, carry: None) -> None:
        plgpu.barrier_wait(empty.at[i % params.tile.num_stages])

    jax.lax.fori_loop(jnp.maximum(step - params.tile.num_stages, 0), step, wait, None)


def _consume(
    scale: Any,
    bias: Any,
    row_scale: Any,
    out: Any,
    warpgroup: Any,
    unit: _TileCoordinate,
    step: Any,
    *,
    params: MatmulParams,
    lhs_tiles: Any,
    rhs_tiles: Any,
    out_tiles: Any,
    full: Any,
    empty: Any,
) -> Any:
    """Compute one tile and store it."""
    tile = params.tile
    steps = jnp.where(unit.matrix < 0, 0, params.steps)
    own_rows = pl.ds(warpgroup * tile.own_rows, tile.own_rows) if tile.split_rows else slice(None)
    own_columns = slice(None) if tile.split_rows else pl.ds(warpgroup * tile.own_columns, tile.own_columns)

    row = unit.row + (warpgroup * tile.own_rows if tile.split_rows else 0)
    column = pl.multiple_of(unit.column + (0 if tile.split_rows else warpgroup * tile.own_columns), tile.own_columns)
    of_rows = None
    if row_scale is not None:
        layout = plgpu.Layout.WGMMA.reduce(1)
        of_rows = plgpu.load(row_scale.at[pl.ds(row, tile.own_rows)], layout=layout, optimized=False)

    def factors(slot: Any) -> tuple[Any, Any]:
        if params.transposed:
            return lhs_tiles.at[slot, own_rows], rhs_tiles.at[slot, own_columns].transpose((1, 0))
        return lhs_tiles.at[slot, own_rows], rhs_tiles.at[slot, :, own_columns]

    values = (_promoted if params.promotes else _summed)(factors, steps, step, full, empty, tile)
    if of_rows is not None:
        values = values * jax.lax.broadcast_in_dim(of_rows, values.shape, (0,))
    low, high = jnp.clip(unit.start - row, 0, tile.own_rows), jnp.clip(unit.end - row, 0, tile.own_rows)
    width = chunk_width(params.dtype)
    for i in range(tile.own_columns // width):
        chunk = values[:, i * width : (i + 1) * width]
        first = pl.multiple_of(column + i * width, width)
        chunk = _shifted(chunk, unit.matrix, first, scale, bias, params)
        _store(chunk, out_tiles.at[warpgroup, i % tile.epilogue_stages], out, row, first, low, high, params)
    return step + steps


def _summed(factors: Callable[..., Any], steps: Any, step: Any, full: Any, empty: Any, tile: Tile) -> Any:
    """Accumulate all steps in the tensor cores. A slot is released after the next step's wgmma is issued."""

    def multiply(sums: Any) -> Any:
        def add(i: Any, carry: None) -> None:
            slot = (step + i) % tile.num_stages
            plgpu.barrier_wait(full.at[slot])
            plgpu.wgmma(sums, *factors(slot))
            plgpu.wgmma_wait(1)

            @when(i > 0)
            def _release() -> None:
                plgpu.barrier_arrive(empty.at[(step + i - 1) % tile.num_stages])

        jax.lax.fori_loop(0, steps, add, None)
        return sums[...]

    values = pl.run_scoped(multiply, plgpu.ACC((tile.own_rows, tile.own_columns)))  # pyright: ignore[reportPrivateImportUsage]

    @when(steps > 0)
    def _release_last() -> None:
        plgpu.barrier_arrive(empty.at[(step + steps - 1) % tile.num_stages])

    return values


def _promoted(factors: Callable[..., Any], steps: Any, step: Any, full: Any, empty: Any, tile: Tile) -> Any:
    """Promoted accumulation: one wgmma accumulator per step, added to float32 sums."""
    shape = (tile.own_rows, tile.own_columns)

    def add(i: Any, sums: Any) -> Any:
        slot = (step + i) % tile.num_stages
        plgpu.barrier_wait(full.at[slot])

        def multiply(of_step: Any) -> Any:
            plgpu.wgmma(of_step, *factors(slot))
            return of_step[...]

        of_step = pl.run_scoped(multiply, plgpu.ACC(shape))  # pyright: ignore[reportPrivateImportUsage]
        plgpu.barrier_arrive(empty.at[slot])
        return sums + of_step

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    return jax.lax.fori_loop(0, steps, add, zeros)


def _shifted(chunk: Any, matrix: Any, first: Any, scale: Any, bias: Any, params: MatmulParams) -> Any:
    """Apply the matrix's scale and bias to the columns from `first` on; rows without a matrix use the zeros after the last one."""
    layout = plgpu.Layout.WGMMA.reduce(0)

    def spread(values: Any, count: int) -> Any:
        own = jnp.where(matrix < 0, count, matrix % count)
        numbers = plgpu.load(values.at[own, pl.ds(first, chunk.shape[1])], layout=layout, optimized=False)
        return jax.lax.broadcast_in_dim(numbers, chunk.shape, (1,))

    if scale is not None:
        chunk = chunk * spread(scale, params.scales)
    if bias is not None:
        chunk = chunk + spread(bias, params.biases)
    return chunk


def _store(chunk: Any, staged: Any, out: Any, row: Any, column: Any, low: Any, high: Any, params: MatmulParams) -> None:
    """Store rows `low <= i < high` of a chunk to rows `row + i`: at once, or in powers of two of rows."""
    height, width = chunk.shape
    plgpu.wait_smem_to_gmem(params.tile.epilogue_stages - 1, wait_read_only=True)
    staged[...] = chunk.astype(params.dtype)
    plgpu.commit_smem()
    columns = pl.ds(column, width)
    # TMA clips stores at the end, but not for an array with a single column tile.
    count = jnp.where(column < params.columns, high - low, 0)

    @when(count == height)
    def _whole() -> None:
        plgpu.copy_smem_to_gmem(staged, out.at[pl.ds(row, height), columns], commit_group=False)

    @when((count > 0) & (count < height))
    def _parts() -> None:
        at, size = low, height // 2
        while size:
            has = (count & size) != 0

            @when(has)
            def _part(at: Any = at, size: int = size) -> None:
                plgpu.copy_smem_to_gmem(staged.at[pl.ds(at, size)], out.at[pl.ds(row + at, size), columns], commit_group=False)

            at, size = at + jnp.where(has, size, 0), size // 2

    plgpu.commit_smem_to_gmem_group()


def multiply_rows(
    lhs: Any,
    rhs: Any,
    bounds: Any,
    tile: Tile,
    dtype: Any,
    *,
    transposed: bool,
    scale: Any = None,
    bias: Any = None,
    row_scale: Any = None,
) -> Any:
    """`lhs [b, m, k]` times the matrices `[1 or b, g, k, n]` of its rows; rows without one become 0.

    k is a multiple of `depth_of` its dtype, n of `DEPTH`. scale and bias are `[1 or b, g, n]`, row_scale `[b, m]`, finite.
    Matrices in float8 are transposed.
    """
    depth = depth_of(lhs.dtype)
    promotes = lhs.dtype.itemsize == 1
    if promotes and tile.sums > MAX_PROMOTED_SUMS:
        raise ValueError(f"{tile}: got {tile.sums} sums of a thread, expected at most {MAX_PROMOTED_SUMS} in float8")
    batch, rows, inner = lhs.shape
    columns = rhs.shape[2 if transposed else 3]
    table, count = schedule.tiles_of(bounds, rows, tile.height, tile.l2_swizzle)
    units = table.shape[0] * -(-columns // tile.block_n)
    params = MatmulParams(
        inner=inner,
        columns=columns,
        depth=depth,
        matrices=rhs.shape[0] * rhs.shape[1],
        scales=0 if scale is None else scale.shape[0] * scale.shape[1],
        biases=0 if bias is None else bias.shape[0] * bias.shape[1],
        row_scales=row_scale is not None,
        promotes=promotes,
        transposed=transposed,
        dtype=jnp.dtype(dtype),
        tile=tile,
        programs=min(tile.programs or units, units),
    )
    others = [_numbers(values, params) for values in (scale, bias) if values is not None]
    if row_scale is not None:
        others.append(jnp.pad(row_scale.reshape(-1).astype(jnp.float32), (0, tile.height)))
    right = (tile.block_n, depth) if transposed else (depth, tile.block_n)
    width = chunk_width(dtype)
    (out,) = call_kernel(
        functools.partial(_rows_kernel, params=params),
        name="grouped_matmul_rows",
        results=(((batch * rows, columns), dtype),),
        like=lhs,
        grid={"program": params.programs},
        cluster=cluster_of(tile),
        warpgroups=CONSUMERS + 1,
        scratch={
            "lhs_tiles": swizzled((tile.num_stages, tile.block_m, depth), lhs.dtype),
            "rhs_tiles": swizzled((tile.num_stages, *right), rhs.dtype),
            "out_tiles": swizzled((CONSUMERS, tile.epilogue_stages, tile.own_rows, width), dtype, height=1),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=tile.num_stages),
            "empty": empty_barriers(tile),
        },
    )(padded_rows(lhs.reshape(batch * rows, inner)), rhs.reshape(-1, *rhs.shape[2:]), table, count, *others)
    return out.reshape(batch, rows, columns)


def _numbers(values: Any, params: MatmulParams) -> Any:
    """float32 per matrix and padded column `[count + 1, n]`, with zeros for rows without a matrix."""
    values = values.reshape(-1, values.shape[-1]).astype(jnp.float32)
    return jnp.pad(values, ((0, 1), (0, params.column_tiles * params.tile.block_n - params.columns)))


def cluster_of(tile: Tile) -> dict[str, int] | None:
    return {"peer": tile.cluster} if tile.cluster > 1 else None


def empty_barriers(tile: Tile) -> Any:
    """Empty mbarriers, one per slot; the consumers of all blocks that a TMA load into the slot reaches arrive on them."""
    if tile.cluster == 1:
        return plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=tile.num_stages)
    return plgpu.ClusterBarrier(collective_axes=("peer",), num_arrivals=CONSUMERS, num_barriers=tile.num_stages)


def padded_rows(rows: Any) -> Any:
    """Pad the number of rows to a multiple of 8, as TMA tiles require."""
    rest = -rows.shape[0] % schedule.ROW_ALIGNMENT
    return jnp.pad(rows, ((0, rest), (0, 0))) if rest else rows


def swizzled(shape: tuple[int, ...], dtype: Any, height: int = schedule.ROW_ALIGNMENT) -> Any:
    """Swizzled shared memory in tiles of `height` rows of 128 bytes: 8 for wgmma operands, 1 to store any number of rows."""
    width = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((height, width)), plgpu.SwizzleTransform(128)))  # pyright: ignore[reportAbstractUsage]
