"""The bias gradient kernel: sums of the logits' gradients, in a fixed order, over the axes along which the bias is broadcast.

For a pairwise bias a program owns tiles of the bias, one after the other, and loops over the batches and heads that share a
tile. For a row bias a program owns some of its tokens in one head, loops over tiles of the others, and writes a sum per head.
Tiles that the positional mask excludes are skipped.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel_pallas.mosaic_gpu._call import swizzled_smem
from ejkernel_pallas.mosaic_gpu.flash_attention.backward import Block, Gradient, Step
from ejkernel_pallas.mosaic_gpu.flash_attention.bias import BiasTiles
from ejkernel_pallas.mosaic_gpu.flash_attention.shape import ROWS, TileRange


@dataclasses.dataclass(frozen=True)
class BiasGradient(Gradient):
    """Static parameters of the kernel.

    Attributes:
        bias: the tiles of the bias.
        sharing: batches and heads that share a tile; 1 for a row bias.
        resident: whether the owned queries of all of these stay in shared memory for all key tiles. Otherwise pairwise tiles
            are scheduled separately, and queries are loaded in each step.
        tiles: key tiles.
    """

    bias: BiasTiles
    sharing: tuple[int, int]
    resident: bool
    tiles: int

    @property
    def batches(self) -> int:
        return self.sharing[0]

    @property
    def members(self) -> int:
        return self.sharing[1]

    @property
    def moves(self) -> bool:
        """Whether owned queries are loaded in each step."""
        return self.bias.by_pair and not self.resident

    @property
    def by_key(self) -> bool:
        return self.bias.by_key

    @property
    def waits_ahead(self) -> bool:
        return False

    @property
    def rings(self) -> tuple[str, ...]:
        return ("own", "other", "bias", "own_value", "other_value") if self.moves else super().rings

    def scratch(self) -> dict[str, Any]:
        held = super().scratch()
        slots = self.num_stages if self.moves else self.batches * self.members
        for name, size in (("own", self.size), ("own_value", self.value_size)):
            held[name] = swizzled_smem((slots, self.warpgroups, ROWS, size), self.dtype)
            if self.moves:
                barrier = functools.partial(plgpu.Barrier, num_barriers=self.num_stages, num_arrivals=self.warpgroups)
                held |= {f"{name}_full": barrier(), f"{name}_empty": barrier()}
        if not self.moves:
            held["own_full"] = plgpu.Barrier(num_barriers=self.warpgroups, num_arrivals=2 * slots)
        return held

    def body(self, *refs: Any, **scratch: Any) -> None:
        _Block(self, refs, scratch).run()


class _Block(Block):
    """One thread block. Tile coordinates are of the bias if it is pairwise, and of query heads otherwise."""

    plan: BiasGradient

    def over_tiles(self, coord: Any, work: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """Fold `work(coord, key tile, carry)` over the owned tiles. For a row bias there is one call, with None as its tile."""
        if self.plan.moves:
            i_block = lax.div(coord.block, jnp.int32(self.plan.tiles))
            return work(coord._replace(block=i_block), coord.block - i_block * self.plan.tiles, carry)
        if self.plan.resident:
            return lax.fori_loop(0, self.plan.tiles, lambda i_tile, carry: work(coord, i_tile, carry), carry)
        return work(coord, None, carry)

    def over_batches(self, coord: Any, i_tile: Any, work: Callable[[Any, TileRange, Any], Any], carry: Any) -> Any:
        """Fold `work(coord, tile_range, carry)` over the batches that share the tile."""

        def step(i_batch: Any, carry: Any) -> Any:
            here = coord._replace(batch=i_batch)
            tile_range = self.tile_range_of(here, 0)
            if i_tile is not None:
                visited = (i_tile >= tile_range.low) & (i_tile < tile_range.high)
                tile_range = dataclasses.replace(tile_range, low=i_tile, high=i_tile + visited.astype(jnp.int32))
            return work(here, tile_range, carry)

        return step(coord.batch, carry) if self.plan.batches == 1 else lax.fori_loop(0, self.plan.batches, step, carry)

    def query_head(self, coord: Any, i_member: Any) -> Any:
        return i_member if self.plan.members > 1 else coord.head

    def own_head(self, coord: Any, i_member: Any) -> Any:
        i_head = self.query_head(coord, i_member)
        return lax.div(i_head, jnp.int32(self.params.group)) if self.plan.by_key else i_head

    def produce(self, coord: Any, done: Any) -> Any:
        def copy(coord: Any, i_tile: Any, done: Any) -> Any:
            return self.over_batches(coord, i_tile, self.copy_tiles, done)

        return self.over_tiles(coord, copy, done)

    def copy_tile(self, name: str, slot: Any, coord: Any, i_member: Any, i_head: Any, here: Any) -> None:
        if not name.startswith("own"):
            super().copy_tile(name, slot, coord, i_member, i_head, here)
            return
        for wg in range(self.plan.warpgroups):
            first = (coord.block * self.plan.warpgroups + wg) * ROWS
            self.copy_rows(name, slot, wg, coord, i_member, first, self.scratch[f"{name}_full"].at[slot])

    def copy_rows(self, name: str, slot: Any, wg: Any, coord: Any, i_member: Any, first: Any, barrier: Any) -> None:
        """Issue the TMA load of one consumer's rows."""
        source = (self.own if name == "own" else self.own_value).at[
            coord.batch, pl.ds(first, ROWS), self.own_head(coord, i_member)
        ]
        plgpu.copy_gmem_to_smem(source, self.scratch[name].at[slot, wg], barrier)

    def copy_owned(self, coord: Any, first: Any) -> None:
        """Load one consumer's rows of all batches and heads, and wait for them."""
        plan, full = self.plan, self.scratch["own_full"].at[self.wg]
        for slot in range(plan.batches * plan.members):
            i_batch, i_member = divmod(slot, plan.members)
            shared = coord._replace(batch=i_batch) if plan.batches > 1 else coord
            for name in ("own", "own_value"):
                self.copy_rows(name, slot, self.wg, shared, i_member, first, full)
        plgpu.barrier_wait(full)

    def consume(self, coord: Any, done: Any) -> Any:
        """Accumulate the gradients of this warpgroup's logits."""
        if not self.plan.moves:
            self.copy_owned(coord, (coord.block * self.plan.warpgroups + self.wg) * ROWS)
        return self.over_tiles(coord, self.add_tile, done)

    def add_tile(self, coord: Any, i_tile: Any, done: Any) -> Any:
        first = (coord.block * self.plan.warpgroups + self.wg) * ROWS

        def add(coord: Any, tile_range: TileRange, carry: Any) -> Any:
            done, b_sum = carry
            step = _Step(self, coord, tile_range, first, done, self.own_token_info(coord, first), None)
            return done + tile_range.count, lax.fori_loop(0, tile_range.count, step.add, b_sum)

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, self.plan.other), jnp.float32), plgpu.Layout.WGMMA)
        done, b_sum = self.over_batches(coord, i_tile, add, (done, zeros))
        (result,) = self.results
        if i_tile is None:
            result.at[coord.batch, coord.head, pl.ds(first, ROWS)][...] = b_sum.sum(axis=1)
        else:
            i_row = self.plan.bias.row(coord.batch, coord.head)
            here = result.at[i_row, pl.ds(first, ROWS), pl.ds(i_tile * self.plan.other, self.plan.other)]
            here[...] = b_sum.astype(self.plan.bias.dtype)
        return done


class _Step(Step):
    """The loop body: gradients of one tile's logits."""

    def owned(self, name: str, slot: Any, i_member: Any) -> Any:
        """The owned rows, as the left MMA operand."""
        plan = self.block.plan
        if plan.moves:
            return self.wait(name, slot).at[self.block.wg]
        i_batch = self.coord.batch if plan.batches > 1 else 0
        return self.block.scratch[name].at[i_batch * plan.members + i_member, self.block.wg]

    def statistics_of(self, slot: Any, i_member: Any) -> tuple[Any, Any]:
        """Row statistics as tiles: the log-sum-exp and minus delta."""
        plan = self.block.plan
        if plan.by_key:
            rows = self.block.scratch["rows"].at[slot]
            loaded = [plgpu.load(rows.at[i], layout=plgpu.Layout.WGMMA.reduce(0)) for i in range(2)]
        else:
            i_head = self.block.query_head(self.coord, i_member)
            loaded = self.block.own_statistics(self.coord._replace(head=i_head), self.first) or ()
        b_shift, b_start = (lax.broadcast_in_dim(b_row, (ROWS, plan.other), [int(plan.by_key)]) for b_row in loaded)
        return b_shift, b_start

    def add(self, i_step: Any, b_sum: Any) -> Any:
        plan, params = self.block.plan, self.block.params
        slot = self.slot(i_step)
        i_member, i_tile = self.tile_range.at(i_step)

        def issue_mmas(scores: Any, d_weights: Any) -> Any:
            own = self.owned("own", slot, i_member)
            plgpu.wgmma(scores, own, self.wait("other", slot).transpose((1, 0)))
            own_value = self.owned("own_value", slot, i_member)
            plgpu.wgmma(d_weights, own_value, self.wait("other_value", slot).transpose((1, 0)))
            b_shift, b_start = self.statistics_of(slot, i_member)
            b_logits = params.logits(plgpu.wgmma_accumulator_load(scores, wait_n=1), self.bias(slot))
            b_weights = self.sloped(jnp.exp2(b_logits * params.unit - b_shift), b_logits)
            b_weights = lax.optimization_barrier(b_weights)
            b_d_weights = plgpu.wgmma_accumulator_load(d_weights, wait_n=0) + b_start
            return self.where_visible(i_tile, self.unless_hidden(b_weights, b_weights * b_d_weights))

        accumulators = (plgpu.WGMMAAccumulatorRef((ROWS, plan.other), jnp.float32) for _ in range(2))
        b_d_logits = pl.run_scoped(issue_mmas, *accumulators)
        for name in plan.rings:
            if name != "bias":
                self.release(name, slot)
        return b_sum + b_d_logits
