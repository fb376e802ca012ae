"""The gradient of every matrix: `left' . right` summed over the rows of its group.

Warp specialised like `rows`: a producer warpgroup, and two consumers with half of the rows of an output tile each. Steps of 64
rows begin at a multiple of 8 at or before the group's first row. Rows of other groups in the first and the last step, which may
hold NaN, are zeroed in shared memory for both operands; the gradient of a matrix without rows is zero. Each output element is
summed by one warpgroup in row order.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel_pallas.mosaic_gpu._call import call_kernel
from ejkernel_pallas.mosaic_gpu.grouped_matmul import schedule
from ejkernel_pallas.mosaic_gpu.grouped_matmul.config import CONSUMERS, DEPTH, PRODUCER_REGISTERS, Tile, chunk_width
from ejkernel_pallas.mosaic_gpu.grouped_matmul.rows import (
    cluster_of,
    consumer_registers,
    empty_barriers,
    padded_rows,
    swizzled,
    when,
)


@dataclasses.dataclass(frozen=True)
class Outer:
    """Static parameters of the kernel.

    Attributes:
        left, right: columns of the operands, which are rows and columns of an output; multiples of `DEPTH`.
        rows: of a member of the batch.
        matrices: of a member.
        members: batch members whose rows are summed together; otherwise 1.
        results: number of output matrices.
        dtype: of the result.
        tile: of the config.
    """

    left: int
    right: int
    rows: int
    matrices: int
    members: int
    results: int
    dtype: Any
    tile: Tile

    @property
    def high(self) -> int:
        """Row tiles of an output."""
        return -(-self.left // self.tile.height)

    @property
    def column_tiles(self) -> int:
        """Column tiles of an output."""
        return -(-self.right // self.tile.block_n)

    @property
    def units(self) -> int:
        return self.results * self.high * self.column_tiles


class _TileCoordinate(NamedTuple):
    """Tile coordinate: matrix, first row and first column of an output tile."""

    matrix: Any
    row: Any
    column: Any


class _Span(NamedTuple):
    """Rows `low <= row < high` of one group, and the steps that load them from row `base` on."""

    low: Any
    high: Any
    base: Any
    steps: Any


def _tile_coordinate(index: Any, outer: Outer) -> _TileCoordinate:
    """The tile coordinate of a work index: swizzle groups of row tiles visit one column tile after the other."""
    each, l2_swizzle = outer.high * outer.column_tiles, min(outer.tile.l2_swizzle, outer.high)
    matrix, within = index // each, index % each
    first = within // (l2_swizzle * outer.column_tiles) * l2_swizzle
    within = within % (l2_swizzle * outer.column_tiles)
    height = jnp.minimum(outer.high - first, l2_swizzle)
    column = within // height
    row = (first + within - column * height) * outer.tile.height
    if outer.tile.cluster > 1:
        row = row + jax.lax.axis_index("peer") * outer.tile.block_m
    return _TileCoordinate(matrix, row, column * outer.tile.block_n)


def _span(bounds: Any, matrix: Any, member: Any, outer: Outer) -> _Span:
    """The span of a matrix's group in batch member `member`, counted from the matrix's own."""
    member = member + matrix // outer.matrices
    at = member * (outer.matrices + 1) + matrix % outer.matrices
    low, high = bounds[at] + member * outer.rows, bounds[at + 1] + member * outer.rows
    base = low // schedule.ROW_ALIGNMENT * schedule.ROW_ALIGNMENT
    return _Span(low, high, base, jnp.where(high > low, (high - base + DEPTH - 1) // DEPTH, 0))


def _outer_kernel(left: Any, right: Any, bounds: Any, out: Any, *, outer: Outer, programs: int, **scratch: Any) -> None:
    warpgroup, program = jax.lax.axis_index("wg"), jax.lax.axis_index("program")
    mine = (outer.units - program + programs - 1) // programs

    def unit_of(i: Any) -> tuple[_TileCoordinate, _Span]:
        unit = _tile_coordinate(jnp.minimum(program + i * programs, outer.units - 1), outer)
        return unit, _span(bounds, unit.matrix, 0, outer)

    def each(work: Any) -> Any:
        """Fold over the tiles of this block; prefetches the span of the next tile."""

        def one(i: Any, carry: tuple[Any, tuple[_TileCoordinate, _Span]]) -> tuple[Any, tuple[_TileCoordinate, _Span]]:
            step, unit = carry
            following = unit_of(i + 1)
            return work(*unit, step), following

        return jax.lax.fori_loop(0, mine, one, (jnp.int32(0), unit_of(0)))[0]

    @when(warpgroup == CONSUMERS)
    def _producer() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        step = each(functools.partial(_produce, left, right, bounds, outer=outer, **scratch))
        num_stages, empty = outer.tile.num_stages, scratch["empty"]

        def wait(i: Any, carry: None) -> None:
            plgpu.barrier_wait(empty.at[i % num_stages])

        jax.lax.fori_loop(jnp.maximum(step - num_stages, 0), step, wait, None)

    @when(warpgroup < CONSUMERS)
    def _consumer() -> None:
        plgpu.set_max_registers(consumer_registers(), action="increase")
        each(functools.partial(_consume, bounds, out, warpgroup, outer=outer, **scratch))
        plgpu.wait_smem_to_gmem(0)


def _members(work: Any, bounds: Any, unit: _TileCoordinate, span: _Span, carry: Any, outer: Outer) -> Any:
    """Fold `work(span, carry)` over the batch members whose rows are summed; `span` is that of the first."""
    if outer.members == 1:
        return work(span, carry)
    return jax.lax.fori_loop(0, outer.members, lambda i, carry: work(_span(bounds, unit.matrix, i, outer), carry), carry)


def _produce(
    left: Any,
    right: Any,
    bounds: Any,
    unit: _TileCoordinate,
    span: _Span,
    step: Any,
    *,
    outer: Outer,
    left_tiles: Any,
    right_tiles: Any,
    full: Any,
    empty: Any,
    **_: Any,
) -> Any:
    """Issue the TMA loads of one tile's group."""
    tile = outer.tile
    lefts = pl.ds(pl.multiple_of(unit.row, tile.block_m), tile.block_m)
    rights = pl.ds(pl.multiple_of(unit.column, tile.block_n), tile.block_n)

    def member(span: _Span, step: Any) -> Any:
        def copy(i: Any, step: Any) -> Any:
            slot = step % tile.num_stages
            rows = pl.ds(pl.multiple_of(span.base + i * DEPTH, schedule.ROW_ALIGNMENT), DEPTH)

            @when(step >= tile.num_stages)
            def _wait() -> None:
                plgpu.barrier_wait(empty.at[slot])

            plgpu.copy_gmem_to_smem(left.at[rows, lefts], left_tiles.at[slot], full.at[slot])
            shared = "peer" if tile.cluster > 1 else None
            plgpu.copy_gmem_to_smem(right.at[rows, rights], right_tiles.at[slot], full.at[slot], collective_axes=shared)
            return step + 1

        return jax.lax.fori_loop(0, span.steps, copy, step)

    return _members(member, bounds, unit, span, step, outer)


def _consume(
    bounds: Any,
    out: Any,
    warpgroup: Any,
    unit: _TileCoordinate,
    span: _Span,
    step: Any,
    *,
    outer: Outer,
    left_tiles: Any,
    right_tiles: Any,
    out_tiles: Any,
    full: Any,
    empty: Any,
    clean: Any,
) -> Any:
    """Compute one tile and store it."""
    tile = outer.tile
    own = tile.block_m // CONSUMERS

    def multiply(sums: Any) -> Any:
        def member(span: _Span, done: Any) -> Any:
            def add(i: Any, done: Any) -> Any:
                slot = (step + done) % tile.num_stages
                low, high = span.low - span.base - i * DEPTH, span.high - span.base - i * DEPTH
                plgpu.barrier_wait(full.at[slot])

                @when((low > 0) | (high < DEPTH))
                def _foreign_rows() -> None:
                    _clear(left_tiles.at[slot, :, pl.ds(warpgroup * own, own)], low, high)
                    half = tile.block_n // CONSUMERS
                    _clear(right_tiles.at[slot, :, pl.ds(warpgroup * half, half)], low, high)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(clean)
                    plgpu.barrier_wait(clean)

                rows = left_tiles.at[slot, :, pl.ds(warpgroup * own, own)].transpose((1, 0))
                plgpu.wgmma(sums, rows, right_tiles.at[slot])
                plgpu.wgmma_wait(1)

                @when(done > 0)
                def _release() -> None:
                    plgpu.barrier_arrive(empty.at[(step + done - 1) % tile.num_stages])

                return done + 1

            return jax.lax.fori_loop(0, span.steps, add, done)

        done = _members(member, bounds, unit, span, jnp.int32(0), outer)
        values = sums[...]

        @when(done > 0)
        def _release_last() -> None:
            plgpu.barrier_arrive(empty.at[(step + done - 1) % tile.num_stages])

        return values, done

    values, done = pl.run_scoped(multiply, plgpu.ACC((own, tile.block_n)))  # pyright: ignore[reportPrivateImportUsage]
    width = chunk_width(outer.dtype)
    rows = pl.ds(pl.multiple_of(unit.row + warpgroup * own, own), own)
    for i in range(tile.block_n // width):
        staged = out_tiles.at[warpgroup, i % tile.epilogue_stages]
        plgpu.wait_smem_to_gmem(tile.epilogue_stages - 1, wait_read_only=True)
        staged[...] = values[:, i * width : (i + 1) * width].astype(outer.dtype)
        plgpu.commit_smem()
        first = pl.multiple_of(unit.column + i * width, width)

        # TMA clips stores at the end, but not for an array with a single column tile.
        @when(first < outer.right)
        def _chunk(staged: Any = staged, first: Any = first) -> None:
            plgpu.copy_smem_to_gmem(staged, out.at[unit.matrix, rows, pl.ds(first, width)], commit_group=False)

        plgpu.commit_smem_to_gmem_group()
    return step + done


def _clear(block: Any, low: Any, high: Any) -> None:
    """Zero the rows outside of `low <= row < high`."""
    row = plgpu.broadcasted_iota(jnp.int32, block.shape, 0, layout=plgpu.Layout.WGMMA)
    values = plgpu.load(block, layout=plgpu.Layout.WGMMA)
    block[...] = jnp.where((row >= low) & (row < high), values, jnp.zeros_like(values))


def sum_products(left: Any, right: Any, bounds: Any, tile: Tile, dtype: Any, *, members: int) -> Any:
    """`left' . right` over the rows of every matrix, `[b / members, g, l, r]`.

    Args:
        left: `[b, m, l]`; l is a multiple of `DEPTH`, as r.
        right: `[b, m, r]`, of the same dtype.
        bounds: `[b, g + 1]`, as of `schedule.bounds_of`.
        tile: of the result; `block_m` of l, `block_n` of r.
        dtype: of the result.
        members: b to sum over the batch too, or 1.
    """
    batch, rows, _ = left.shape
    outer = Outer(
        left=left.shape[2],
        right=right.shape[2],
        rows=rows,
        matrices=bounds.shape[1] - 1,
        members=members,
        results=batch // members * (bounds.shape[1] - 1),
        dtype=jnp.dtype(dtype),
        tile=tile,
    )
    programs = min(outer.units, tile.programs) if tile.programs else outer.units
    width = chunk_width(dtype)
    (out,) = call_kernel(
        functools.partial(_outer_kernel, outer=outer, programs=programs),
        name="grouped_matmul_outer",
        results=(((outer.results, outer.left, outer.right), dtype),),
        like=left,
        grid={"program": programs},
        cluster=cluster_of(tile),
        warpgroups=CONSUMERS + 1,
        scratch={
            "left_tiles": swizzled((tile.num_stages, DEPTH, tile.block_m), left.dtype),
            "right_tiles": swizzled((tile.num_stages, DEPTH, tile.block_n), right.dtype),
            "out_tiles": swizzled((CONSUMERS, tile.epilogue_stages, tile.block_m // CONSUMERS, width), dtype),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=tile.num_stages),
            "empty": empty_barriers(tile),
            "clean": plgpu.Barrier(num_arrivals=CONSUMERS),
        },
    )(*(padded_rows(values.reshape(batch * rows, -1)) for values in (left, right)), bounds.reshape(-1))
    return out.reshape(batch // members, outer.matrices, outer.left, outer.right)
