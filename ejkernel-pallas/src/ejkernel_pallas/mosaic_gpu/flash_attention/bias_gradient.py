"""The kernel of the bias's gradient: the sums of the logits' gradients, in one order, over what the bias shares.

Of a bias by pair, a program owns tiles of its own shape, one after the other, and walks over the batches and heads that share a
tile. Of a row of keys or queries, a program owns some of these tokens in one head, walks over tiles of the others, and leaves a sum
for each head. Tiles that no rule of position lets through are not visited.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas.mosaic_gpu._call import tiled
from ejkernel_pallas.mosaic_gpu.flash_attention.backward import Block, Gradient, Step
from ejkernel_pallas.mosaic_gpu.flash_attention.bias import BiasTiles
from ejkernel_pallas.mosaic_gpu.flash_attention.shape import ROWS, Walk


@dataclasses.dataclass(frozen=True)
class BiasGradient(Gradient):
    """What the kernel is built for.

    Attributes:
        bias: the tiles of the bias.
        sharing: batches and heads that share a tile; 1 for a row.
        resident: the owned queries of all of these stay in shared memory, for all tiles of keys. Otherwise tiles by pair are blocks
            of their own, and queries are copied for each step.
        tiles: of keys.
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
        """Whether owned queries are copied for each step."""
        return self.bias.by_pair and not self.resident

    @property
    def by_key(self) -> bool:
        return self.bias.by_key

    @property
    def ahead(self) -> bool:
        return False

    @property
    def rings(self) -> tuple[str, ...]:
        return ("own", "other", "bias", "own_value", "other_value") if self.moves else super().rings

    def scratch(self) -> dict[str, Any]:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        held = super().scratch()
        places = self.stages if self.moves else self.batches * self.members
        for name, size in (("own", self.size), ("own_value", self.value_size)):
            held[name] = tiled((places, self.warpgroups, ROWS, size), self.dtype)
            if self.moves:
                barrier = functools.partial(plgpu.Barrier, num_barriers=self.stages, num_arrivals=self.warpgroups)
                held |= {f"{name}_here": barrier(), f"{name}_free": barrier()}
        if not self.moves:
            held["own_here"] = plgpu.Barrier(num_barriers=self.warpgroups, num_arrivals=2 * places)
        return held

    def body(self, *refs: Any, **scratch: Any) -> None:
        _Block(self, refs, scratch).run()


class _Block(Block):
    """One program at work. Places of the schedule are of the bias if that is by pair, and of query heads otherwise."""

    plan: BiasGradient

    def over_tiles(self, place: Any, work: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """Call `work(place, tile of keys, carry)`, which returns the next carry, for every tile that is owned; the last carry. Of a
        row there is one call, without a tile."""
        if self.plan.moves:
            i_block = lax.div(place.block, jnp.int32(self.plan.tiles))
            return work(place._replace(block=i_block), place.block - i_block * self.plan.tiles, carry)
        if self.plan.resident:
            return lax.fori_loop(0, self.plan.tiles, lambda i_tile, carry: work(place, i_tile, carry), carry)
        return work(place, None, carry)

    def over_batches(self, place: Any, i_tile: Any, work: Callable[[Any, Walk, Any], Any], carry: Any) -> Any:
        """Call `work(place, walk, carry)`, which returns the next carry, for every batch that shares the tile; the last carry."""

        def step(i_batch: Any, carry: Any) -> Any:
            here = place._replace(batch=i_batch)
            walk = self.walk_of(here, 0)
            if i_tile is not None:
                visited = (i_tile >= walk.low) & (i_tile < walk.high)
                walk = dataclasses.replace(walk, low=i_tile, high=i_tile + visited.astype(jnp.int32))
            return work(here, walk, carry)

        return step(place.batch, carry) if self.plan.batches == 1 else lax.fori_loop(0, self.plan.batches, step, carry)

    def query_head(self, place: Any, i_member: Any) -> Any:
        return i_member if self.plan.members > 1 else place.head

    def own_head(self, place: Any, i_member: Any) -> Any:
        i_head = self.query_head(place, i_member)
        return lax.div(i_head, jnp.int32(self.rules.group)) if self.plan.by_key else i_head

    def produce(self, place: Any, done: Any) -> Any:
        def copy(place: Any, i_tile: Any, done: Any) -> Any:
            return self.over_batches(place, i_tile, self.copy_tiles, done)

        return self.over_tiles(place, copy, done)

    def copy_tile(self, name: str, slot: Any, place: Any, i_member: Any, i_head: Any, here: Any) -> None:
        if not name.startswith("own"):
            super().copy_tile(name, slot, place, i_member, i_head, here)
            return
        for wg in range(self.plan.warpgroups):
            first = (place.block * self.plan.warpgroups + wg) * ROWS
            self.copy_rows(name, slot, wg, place, i_member, first, self.scratch[f"{name}_here"].at[slot])

    def copy_rows(self, name: str, slot: Any, wg: Any, place: Any, i_member: Any, first: Any, barrier: Any) -> None:
        """Copy what one consumer owns."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        source = (self.own if name == "own" else self.own_value).at[
            place.batch, pl.ds(first, ROWS), self.own_head(place, i_member)
        ]
        plgpu.copy_gmem_to_smem(source, self.scratch[name].at[slot, wg], barrier)

    def copy_owned(self, place: Any, first: Any) -> None:
        """Copy what one consumer owns of all batches and heads, waited for."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        plan, here = self.plan, self.scratch["own_here"].at[self.wg]
        for slot in range(plan.batches * plan.members):
            i_batch, i_member = divmod(slot, plan.members)
            shared = place._replace(batch=i_batch) if plan.batches > 1 else place
            for name in ("own", "own_value"):
                self.copy_rows(name, slot, self.wg, shared, i_member, first, here)
        plgpu.barrier_wait(here)

    def consume(self, place: Any, done: Any) -> Any:
        """Add up the gradients of this warpgroup's logits."""
        if not self.plan.moves:
            self.copy_owned(place, (place.block * self.plan.warpgroups + self.wg) * ROWS)
        return self.over_tiles(place, self.add_tile, done)

    def add_tile(self, place: Any, i_tile: Any, done: Any) -> Any:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        first = (place.block * self.plan.warpgroups + self.wg) * ROWS

        def add(place: Any, walk: Walk, carry: Any) -> Any:
            done, b_sum = carry
            step = _Step(self, place, walk, first, done, self.own_facts(place, first), None)
            return done + walk.count, lax.fori_loop(0, walk.count, step.add, b_sum)

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, self.plan.other), jnp.float32), plgpu.Layout.WGMMA)
        done, b_sum = self.over_batches(place, i_tile, add, (done, zeros))
        (result,) = self.results
        if i_tile is None:
            result.at[place.batch, place.head, pl.ds(first, ROWS)][...] = b_sum.sum(axis=1)
        else:
            i_row = self.plan.bias.row(place.batch, place.head)
            here = result.at[i_row, pl.ds(first, ROWS), pl.ds(i_tile * self.plan.other, self.plan.other)]
            here[...] = b_sum.astype(self.plan.bias.dtype)
        return done


class _Step(Step):
    """The gradients of one tile's logits."""

    def owned(self, name: str, slot: Any, i_member: Any) -> Any:
        """What is owned, as the left factor of a product."""
        plan = self.block.plan
        if plan.moves:
            return self.wait(name, slot).at[self.block.wg]
        i_batch = self.place.batch if plan.batches > 1 else 0
        return self.block.scratch[name].at[i_batch * plan.members + i_member, self.block.wg]

    def statistics_of(self, slot: Any, i_member: Any) -> tuple[Any, Any]:
        """What exponentials are shifted by and the gradients of weights start from, as tiles."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        plan = self.block.plan
        if plan.by_key:
            rows = self.block.scratch["rows"].at[slot]
            loaded = [plgpu.load(rows.at[i], layout=plgpu.Layout.WGMMA.reduce(0)) for i in range(2)]
        else:
            i_head = self.block.query_head(self.place, i_member)
            loaded = self.block.own_statistics(self.place._replace(head=i_head), self.first) or ()
        b_shift, b_start = (lax.broadcast_in_dim(b_row, (ROWS, plan.other), [int(plan.by_key)]) for b_row in loaded)
        return b_shift, b_start

    def add(self, i_step: Any, b_sum: Any) -> Any:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        plan, rules = self.block.plan, self.block.rules
        slot = self.slot(i_step)
        i_member, i_tile = self.walk.at(i_step)

        def products(scores: Any, d_weights: Any) -> Any:
            own = self.owned("own", slot, i_member)
            plgpu.wgmma(scores, own, self.wait("other", slot).transpose((1, 0)))
            own_value = self.owned("own_value", slot, i_member)
            plgpu.wgmma(d_weights, own_value, self.wait("other_value", slot).transpose((1, 0)))
            b_shift, b_start = self.statistics_of(slot, i_member)
            b_logits = rules.logits(plgpu.wgmma_accumulator_load(scores, wait_n=1), self.bias(slot))
            b_weights = self.sloped(jnp.exp2(b_logits * rules.unit - b_shift), b_logits)
            b_weights = lax.optimization_barrier(b_weights)
            b_d_weights = plgpu.wgmma_accumulator_load(d_weights, wait_n=0) + b_start
            return self.where_seen(i_tile, self.unless_hidden(b_weights, b_weights * b_d_weights))

        accumulators = (plgpu.WGMMAAccumulatorRef((ROWS, plan.other), jnp.float32) for _ in range(2))
        b_d_logits = pl.run_scoped(products, *accumulators)
        for name in plan.rings:
            if name != "bias":
                self.free(name, slot)
        return b_sum + b_d_logits
