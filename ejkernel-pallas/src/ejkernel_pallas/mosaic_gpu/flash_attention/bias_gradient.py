"""The kernel of the bias's gradient: the sums of the logits' gradients, in one order, over what the bias shares.

Of a bias by pair, a program owns tiles of its own shape, one after the other, and walks over the batches and heads that share a
tile; queries and keys change with each step. Of a row of keys or queries, a program owns some of these tokens in one head, walks
over tiles of the others, and leaves a sum for each head. Tiles that no rule of position lets through are not visited.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas.mosaic_gpu._call import tiled
from ejkernel_pallas.mosaic_gpu.flash_attention.backward import Block, Gradient, Step
from ejkernel_pallas.mosaic_gpu.flash_attention.shape import ROWS, Walk


@dataclasses.dataclass(frozen=True, kw_only=True)
class BiasGradient(Gradient):
    """What the kernel is built for.

    Attributes:
        tiles: of keys, each of which is a block of its own with a block of queries where the bias is by pair.
        calls: batches and heads of the call.
    """

    tiles: int
    calls: tuple[int, int]

    @property
    def moves(self) -> bool:
        """Whether the owned tokens' arrays change with each step."""
        return self.bias.by_pair

    @property
    def by_key(self) -> bool:
        return self.bias.by_key

    @property
    def ahead(self) -> bool:
        return False

    @property
    def batches(self) -> int:
        """That share a tile."""
        return self.calls[0] if self.moves and self.bias.batch == 1 else 1

    @property
    def members(self) -> int:
        return self.calls[1] if self.moves and self.bias.heads == 1 else 1

    def scratch(self) -> dict[str, Any]:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        held = super().scratch()
        if self.moves:
            barrier = functools.partial(plgpu.Barrier, num_barriers=self.stages)
            held |= {
                "own": tiled((self.stages, self.warpgroups, ROWS, self.size), self.dtype),
                "own_value": tiled((self.stages, self.warpgroups, ROWS, self.value_size), self.dtype),
                "rows": plgpu.SMEM((self.stages, 2, self.warpgroups * ROWS), jnp.float32),
                "own_here": barrier(num_arrivals=self.warpgroups + 1),
                "own_value_here": barrier(num_arrivals=self.warpgroups),
                "own_free": barrier(num_arrivals=self.warpgroups),
                "own_value_free": barrier(num_arrivals=self.warpgroups),
            }
        return held

    @property
    def rings(self) -> tuple[str, ...]:
        return (("own", "other", "bias", "own_value", "other_value")) if self.moves else super().rings

    def body(self, *refs: Any, **scratch: Any) -> None:
        _Block(self, refs, scratch).run()


class _Block(Block):
    """One program at work."""

    plan: BiasGradient

    def place_of(self, place: Any) -> tuple[Any, Any]:
        """What a place of the schedule stands for: a block of owned tokens, and the tile of keys if that is fixed."""
        if not self.plan.moves:
            return place, None
        i_block = lax.div(place.block, jnp.int32(self.plan.tiles))
        return place._replace(block=i_block), place.block - i_block * self.plan.tiles

    def over_batches(self, place: Any, i_tile: Any, work: Any, carry: Any) -> Any:
        """Call `work(place, walk, carry)`, which returns the next carry, for every batch that shares the tile; the last carry."""

        def step(i_batch: Any, carry: Any) -> Any:
            here = place._replace(batch=i_batch)
            walk = self.walk_of(here, 0)
            if i_tile is not None:
                visited = (i_tile >= walk.low) & (i_tile < walk.high)
                walk = dataclasses.replace(walk, low=i_tile, high=i_tile + visited.astype(jnp.int32))
            return work(here, walk, carry)

        if self.plan.batches == 1:
            return step(place.batch, carry)
        return lax.fori_loop(0, self.plan.batches, step, carry)

    def head_of(self, place: Any, i_member: Any) -> Any:
        i_head = self.query_head(place, i_member)
        return i_head if self.plan.by_key else lax.div(i_head, jnp.int32(self.rules.group))

    def query_head(self, place: Any, i_member: Any) -> Any:
        return i_member if self.plan.members > 1 else place.head

    def produce(self, place: Any, done: Any) -> Any:
        place, i_tile = self.place_of(place)
        return self.over_batches(place, i_tile, self.copy_tiles, done)

    def copy_tile(self, name: str, slot: Any, place: Any, i_member: Any, i_head: Any, here: Any) -> None:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        if not name.startswith("own"):
            super().copy_tile(name, slot, place, i_member, i_head, here)
            return
        i_head, first = self.query_head(place, i_member), place.block * (self.plan.warpgroups * ROWS)
        s_tile, barrier = self.scratch[name].at[slot], self.scratch[f"{name}_here"].at[slot]
        source = self.own if name == "own" else self.own_value
        for wg in range(self.plan.warpgroups):
            rows = pl.ds(first + wg * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(source.at[place.batch, rows, i_head], s_tile.at[wg], barrier)
        if name == "own":
            rows = self.rows.at[place.batch, i_head, :, pl.ds(first, self.plan.warpgroups * ROWS)]
            plgpu.copy_gmem_to_smem(rows, self.scratch["rows"].at[slot], barrier)

    def consume(self, place: Any, done: Any) -> Any:
        """Add up the gradients of this warpgroup's logits."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        place, i_tile = self.place_of(place)
        first = (place.block * self.plan.warpgroups + self.wg) * ROWS
        layout = plgpu.Layout.WGMMA
        statistics = None
        if not self.plan.moves:
            i_key_head = lax.div(place.head, jnp.int32(self.rules.group))
            _, _, here = self.copy_own(place._replace(head=i_key_head) if self.plan.by_key else place, first)
            statistics = self.own_statistics(place, first)
            plgpu.barrier_wait(here)

        def add(place: Any, walk: Walk, carry: Any) -> Any:
            done, b_sum = carry
            facts = self.own_facts(place, first)
            step = _Step(self, place, walk, first, done, facts, statistics)
            return done + walk.count, lax.fori_loop(0, walk.count, step.add, b_sum)

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, self.plan.other), jnp.float32), layout)
        done, b_sum = self.over_batches(place, i_tile, add, (done, zeros))
        (result,) = self.results
        if self.plan.moves:
            i_row = self.plan.bias.row(place.batch, place.head)
            here = result.at[i_row, pl.ds(first, ROWS), pl.ds(i_tile * self.plan.other, self.plan.other)]
            here[...] = b_sum.astype(self.plan.bias.dtype)
        else:
            result.at[place.batch, place.head, pl.ds(first, ROWS)][...] = b_sum.sum(axis=1)
        return done


class _Step(Step):
    """The gradients of one tile's logits."""

    block: _Block

    def statistics_of(self, slot: Any) -> tuple[Any, Any]:
        """What the exponentials and the gradients of weights start from, as tiles."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        plan, layout = self.block.plan, plgpu.Layout.WGMMA
        shape = (ROWS, plan.other)
        if self.statistics is not None:
            first, second = (lax.broadcast_in_dim(b_row, shape, [0]) for b_row in self.statistics)
            return first, second
        rows = self.block.scratch["rows"].at[slot]
        if plan.by_key:
            loaded = [plgpu.load(rows.at[i], layout=layout.reduce(0)) for i in range(2)]
        else:
            here = pl.ds(self.block.wg * ROWS, ROWS)
            loaded = [plgpu.load(rows.at[i, here], layout=layout.reduce(1), optimized=False) for i in range(2)]
        first, second = (lax.broadcast_in_dim(b_row, shape, [1 if plan.by_key else 0]) for b_row in loaded)
        return first, second

    def add(self, i_step: Any, b_sum: Any) -> Any:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        plan, rules = self.block.plan, self.block.rules
        slot = self.slot(i_step)
        _, i_tile = self.walk.at(i_step)
        shape = (ROWS, plan.other)
        own, own_value = self.factors()
        if plan.moves:
            own, own_value = (self.wait(name, slot).at[self.block.wg] for name in ("own", "own_value"))

        def products(scores: Any, d_weights: Any) -> Any:
            plgpu.wgmma(scores, own, self.wait("other", slot).transpose((1, 0)))
            plgpu.wgmma(d_weights, own_value, self.wait("other_value", slot).transpose((1, 0)))
            b_shift, b_start = self.statistics_of(slot)
            b_logits = rules.logits(plgpu.wgmma_accumulator_load(scores, wait_n=1), self.bias(slot))
            b_weights = self.sloped(jnp.exp2(b_logits * rules.unit - b_shift), b_logits)
            b_weights = lax.optimization_barrier(b_weights)
            b_d_weights = plgpu.wgmma_accumulator_load(d_weights, wait_n=0) + b_start
            return self.where_seen(i_tile, self.unless_hidden(b_weights, b_weights * b_d_weights))

        accumulators = (plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for _ in range(2))
        b_d_logits = pl.run_scoped(products, *accumulators)
        for name in plan.rings:
            if name != "bias":
                self.free(name, slot)
        return b_sum + b_d_logits
