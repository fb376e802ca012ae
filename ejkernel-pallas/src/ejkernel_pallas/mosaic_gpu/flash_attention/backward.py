"""The dK/dV kernel, which owns keys and loops over queries, and the dQ kernel, which owns queries and loops over keys.

Both recompute the weights of a tile from the log-sum-exp and accumulate in registers in a fixed order, so results are
deterministic. With w the weights and o the output, the gradient of a logit is `w * (d_out . value - delta)`, where delta is
`d_out . o` minus the gradient of the log-sum-exp. As in the forward kernel, one producer warpgroup issues TMA loads and the
consumers issue MMAs.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel_pallas.mosaic_gpu._call import (
    Accumulator,
    accumulate,
    call_kernel,
    swizzled_smem,
    wait_for_wgmma,
    with_accumulator,
)
from ejkernel_pallas.mosaic_gpu.flash_attention.bias import BiasTiles
from ejkernel_pallas.mosaic_gpu.flash_attention.bias_loads import bias_scratch, copy_bias_tile, load_bias_tile
from ejkernel_pallas.mosaic_gpu.flash_attention.mask_params import MaskParams
from ejkernel_pallas.mosaic_gpu.flash_attention.shape import REGISTERS, ROWS, TileRange
from ejkernel_pallas.mosaic_gpu.flash_attention.tile_scheduler import TileScheduler


@dataclasses.dataclass(frozen=True)
class Gradient:
    """Static parameters of one of the kernels.

    Attributes:
        params: of the call.
        scheduler: tile scheduler of key blocks and their heads, or of query blocks and theirs.
        other: rows of a streamed tile; a consumer owns `ROWS`.
        num_stages: pipeline stages: tiles in shared memory.
        warpgroups: consumers of a block.
        size, value_size: of heads, as they lie in memory.
        dtype: of query, key and value.
        wanted: gradients to compute: "query", or "key" and "value" together or alone.
        ranges: whether tile ranges are loaded from an array.
        splits: of each block's loop; a program runs one of them. With several, results are float32 partial results `[splits, B,
            T, H, D]` with T whole blocks, to be combined.
        bias: the tiles of the bias, if there is one.
    """

    params: MaskParams
    scheduler: TileScheduler
    other: int
    num_stages: int
    warpgroups: int
    size: int
    value_size: int
    dtype: Any
    wanted: tuple[str, ...]
    ranges: bool
    splits: int
    bias: BiasTiles | None

    @property
    def by_key(self) -> bool:
        """Whether keys are owned, not queries."""
        return "query" not in self.wanted

    @property
    def waits_ahead(self) -> bool:
        """Whether a consumer waits for the next tile while the MMAs of the current one run: not with one stage or one gradient."""
        return self.num_stages > 1 and self.wanted != ("key",) and self.wanted != ("value",)

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of the accumulators."""
        return tuple(self.value_size if name == "value" else self.size for name in self.wanted)

    @property
    def members(self) -> int:
        """Streamed heads per owned head."""
        return self.params.group if self.by_key else 1

    def scratch(self) -> dict[str, Any]:
        barrier = functools.partial(plgpu.Barrier, num_barriers=self.num_stages)
        held = {
            "own": swizzled_smem((self.warpgroups, ROWS, self.size), self.dtype),
            "own_value": swizzled_smem((self.warpgroups, ROWS, self.value_size), self.dtype),
            "other": swizzled_smem((self.num_stages, self.other, self.size), self.dtype),
            "other_value": swizzled_smem((self.num_stages, self.other, self.value_size), self.dtype),
            "own_full": plgpu.Barrier(num_barriers=self.warpgroups, num_arrivals=2),
            "other_full": barrier(num_arrivals=2 if self.by_key else 1),
            "other_value_full": barrier(),
            "other_empty": barrier(num_arrivals=self.warpgroups),
            "other_value_empty": barrier(num_arrivals=self.warpgroups),
        }
        if self.by_key:
            held["rows"] = plgpu.SMEM((self.num_stages, 2, self.other), jnp.float32)
        return held if self.bias is None else held | bias_scratch(self.bias)

    @property
    def rings(self) -> tuple[str, ...]:
        """Arrays with a TMA load per tile."""
        return ("other", "other_value") if self.bias is None else ("other", "bias", "other_value")

    def body(self, *refs: Any, **scratch: Any) -> None:
        """The kernel body: references to the inputs of `launch`, then outputs."""
        Block(self, refs, scratch).run()

    def launch(self, arrays: list[Any], results: list[tuple[tuple[int, ...], Any]]) -> list[jax.Array]:
        """Run the kernel on query, key, value, the output's gradient, row statistics, token info and ranges."""
        kernel = call_kernel(
            self.body,
            name=f"ejkernel_flash_attention_backward_{'_'.join(self.wanted)}",
            results=results,
            like=arrays[0],
            grid={"block": self.scheduler.programs},
            warpgroups=self.warpgroups + 1,
            scratch=self.scratch(),
            unsafe_no_auto_barriers=True,
        )
        return kernel(*arrays)


class Block:
    """One thread block. "own" and "other" are keys and queries, or queries and keys; their "values" are the MMA operands of the
    weights' gradients: values and the output's gradient, or the reverse."""

    def __init__(self, plan: Gradient, refs: tuple[Any, ...], scratch: dict[str, Any]) -> None:
        self.plan, self.params, self.scratch = plan, plan.params, scratch
        rest = list(refs)
        query, key, value, grad, self.rows = (rest.pop(0) for _ in range(5))
        self.token_info = {name: rest.pop(0) for name in self.params.token_info}
        self.bias = rest.pop(0) if plan.bias else None
        self.ranges = rest.pop(0) if plan.ranges else None
        self.results = rest
        self.own, self.own_value, self.other, self.other_value = (
            (key, value, query, grad) if plan.by_key else (query, grad, key, value)
        )
        self.wg = lax.axis_index("wg")

    def run(self) -> None:
        consumer, producer = REGISTERS[self.plan.warpgroups]

        @pl.when(self.wg < self.plan.warpgroups)
        def _consume() -> None:
            plgpu.set_max_registers(consumer, action="increase")
            self.plan.scheduler.loop(self.consume)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(self.wg == self.plan.warpgroups)
        def _produce() -> None:
            plgpu.set_max_registers(producer, action="decrease")
            done = self.plan.scheduler.loop(self.produce)
            for slot in range(self.plan.num_stages):
                for name in self.plan.rings:
                    pl.when(done > slot)(functools.partial(plgpu.barrier_wait, self.scratch[f"{name}_empty"].at[slot]))

    def owner(self, coord: Any) -> tuple[Any, Any]:
        """The tile coordinate of the owned block, and the split."""
        if self.plan.splits == 1:
            return coord, 0
        head = lax.div(coord.head, jnp.int32(self.plan.splits))
        return coord._replace(head=head), coord.head - head * self.plan.splits

    def tile_range_of(self, coord: Any, i_split: Any) -> TileRange:
        """The tile range that a program visits for a block."""
        owned = self.plan.warpgroups * ROWS
        first = coord.block * owned
        if self.ranges is not None:
            i_batch = coord.batch if self.ranges.shape[0] > 1 else 0
            ends = tuple(self.ranges[i_batch, coord.block, end] for end in range(4))
        elif self.plan.by_key:
            ends = self.params.query_range(first, first + (owned - 1), self.plan.other)
        else:
            ends = self.params.key_range(first, first + (owned - 1), self.plan.other)
        return TileRange(*ends, members=self.plan.members, block=self.plan.other, splits=self.plan.splits, split=i_split)

    def query_head(self, coord: Any, i_member: Any) -> Any:
        return coord.head * self.params.group + i_member if self.plan.by_key else coord.head

    def head_of(self, coord: Any, i_member: Any) -> Any:
        """The streamed head."""
        i_head = self.query_head(coord, i_member)
        return i_head if self.plan.by_key else lax.div(i_head, jnp.int32(self.params.group))

    def produce(self, coord: Any, done: Any) -> Any:
        """Issue the TMA loads of a block. Returns the number of tiles loaded so far."""
        coord, i_split = self.owner(coord)
        return self.copy_tiles(coord, self.tile_range_of(coord, i_split), done)

    def copy_tiles(self, coord: Any, tile_range: TileRange, done: Any) -> Any:
        """Issue the TMA loads of a tile range. Returns the number of tiles loaded so far."""
        num_stages = self.plan.num_stages

        def step(i_step: Any, _: Any) -> None:
            i_member, i_tile = tile_range.at(i_step)
            i_head = self.head_of(coord, i_member)
            count = done + i_step
            slot, used = lax.rem(count, jnp.int32(num_stages)), count >= num_stages
            here = pl.ds(i_tile * self.plan.other, self.plan.other)
            for name in self.plan.rings:
                pl.when(used)(functools.partial(plgpu.barrier_wait, self.scratch[f"{name}_empty"].at[slot]))
                self.copy_tile(name, slot, coord, i_member, i_head, here)

        lax.fori_loop(0, tile_range.count, step, None)
        return done + tile_range.count

    def copy_tile(self, name: str, slot: Any, coord: Any, i_member: Any, i_head: Any, here: Any) -> None:
        """Issue the TMA load of one array's tile; `i_head` and `here` are its streamed head and rows."""
        s_tile, barrier = self.scratch[name].at[slot], self.scratch[f"{name}_full"].at[slot]
        bias = self.plan.bias
        if bias is not None and name == "bias":
            i_row = bias.row(coord.batch, self.query_head(coord, i_member))
            copy_bias_tile(bias, self.bias, i_row, coord.block * (self.plan.warpgroups * ROWS), here.start, s_tile, barrier)
            return
        source = self.other if name == "other" else self.other_value
        plgpu.copy_gmem_to_smem(source.at[coord.batch, here, i_head], s_tile, barrier)
        if self.plan.by_key and name == "other":
            plgpu.copy_gmem_to_smem(self.rows.at[coord.batch, i_head, :, here], self.scratch["rows"].at[slot], barrier)

    def consume(self, coord: Any, done: Any) -> Any:
        """Accumulate the gradients of this warpgroup's rows."""
        coord, i_split = self.owner(coord)
        tile_range = self.tile_range_of(coord, i_split)
        first = (coord.block * self.plan.warpgroups + self.wg) * ROWS
        s_own, s_own_value, full = self.copy_own(coord, first)
        token_info = self.own_token_info(coord, first)
        statistics = self.own_statistics(coord, first)
        plgpu.barrier_wait(full)
        step = Step(self, coord, tile_range, first, done, token_info, statistics)
        zeros = tuple(
            plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), plgpu.Layout.WGMMA) for width in self.plan.widths
        )
        if self.plan.waits_ahead:
            step.wait_for(0)
        sums = lax.fori_loop(0, tile_range.count, step.by_key if self.plan.by_key else step.by_query, zeros)
        sums = [
            b_sum if name == "value" else b_sum * self.params.scale for name, b_sum in zip(self.plan.wanted, sums, strict=True)
        ]
        if self.plan.splits > 1:
            for result, b_sum in zip(self.results, sums, strict=True):
                result.at[i_split, coord.batch, pl.ds(first, ROWS), coord.head][...] = b_sum
            return done + tile_range.count
        plgpu.commit_smem()  # all warps have read the rows that the gradients overwrite
        held = [s_own_value if name == "value" else s_own for name in self.plan.wanted]
        for s_held, b_sum in zip(held, sums, strict=True):
            s_held[...] = b_sum.astype(self.plan.dtype)
        plgpu.commit_smem()
        for result, s_held in zip(self.results, held, strict=True):
            plgpu.copy_smem_to_gmem(s_held, result.at[coord.batch, pl.ds(first, ROWS), coord.head], commit_group=False)
        plgpu.commit_smem_to_gmem_group()
        return done + tile_range.count

    def copy_own(self, coord: Any, first: Any) -> tuple[Any, Any, Any]:
        """Issue the TMA loads of the owned rows. Returns their buffers and mbarrier."""
        s_own, s_own_value = self.scratch["own"].at[self.wg], self.scratch["own_value"].at[self.wg]
        full = self.scratch["own_full"].at[self.wg]
        for source, s_held in ((self.own, s_own), (self.own_value, s_own_value)):
            plgpu.copy_gmem_to_smem(source.at[coord.batch, pl.ds(first, ROWS), coord.head], s_held, full)
        return s_own, s_own_value, full

    def own_token_info(self, coord: Any, first: Any) -> dict[str, Any]:
        rows = plgpu.Layout.WGMMA.reduce(1)
        own = "key" if self.plan.by_key else "query"
        return {
            name: self.load_token_info(name, coord, first, ROWS, rows)
            for name in self.params.token_info
            if name.startswith(own)
        }

    def own_statistics(self, coord: Any, first: Any) -> tuple[Any, Any] | None:
        """Row statistics of owned queries."""
        if self.plan.by_key:
            return None
        rows = plgpu.Layout.WGMMA.reduce(1)
        sources = (self.rows.at[coord.batch, coord.head, i, pl.ds(first, ROWS)] for i in range(2))
        b_shift, b_start = (plgpu.load(source, layout=rows, optimized=False) for source in sources)
        return b_shift, b_start

    def load_token_info(self, name: str, coord: Any, first: Any, count: int, layout: Any) -> Any:
        array = self.token_info[name]
        source = array.at[coord.batch if array.shape[0] > 1 else 0, pl.ds(first, count)]
        return plgpu.load(source, layout=layout, optimized=False)


@dataclasses.dataclass
class Step:
    """The loop body: gradients of one tile."""

    block: Any
    coord: Any
    tile_range: TileRange
    first: Any
    done: Any
    token_info: dict[str, Any]
    statistics: Any

    def factors(self) -> tuple[Any, ...]:
        """The owned rows, as left MMA operands."""
        # Recomputed in each step: descriptors hoisted out of the loop would fill the uniform registers.
        i_own = lax.optimization_barrier(self.block.wg)
        return tuple(self.block.scratch[name].at[i_own] for name in ("own", "own_value"))

    def slot(self, i_step: Any) -> Any:
        return lax.rem(self.done + i_step, jnp.int32(self.block.plan.num_stages))

    def wait(self, name: str, slot: Any) -> Any:
        plgpu.barrier_wait(self.block.scratch[f"{name}_full"].at[slot])
        return self.block.scratch[name].at[slot]

    def wait_for(self, i_step: Any) -> None:
        """Wait for the tile of this step, if there is such a step."""

        @pl.when(i_step < self.tile_range.count)
        def _() -> None:
            self.wait("other", self.slot(i_step))

    def release(self, name: str, slot: Any) -> None:
        plgpu.barrier_arrive(self.block.scratch[f"{name}_empty"].at[slot])

    def where_visible(self, i_tile: Any, b_value: Any) -> Any:
        """The tile with masked pairs set to 0, even where a row's statistics are NaN."""
        params = self.block.params
        if not params.has_mask and not self.ragged():
            return b_value
        shape = b_value.shape
        return lax.cond(
            self.tile_range.whole(i_tile), lambda: b_value, lambda: jnp.where(self.visible(i_tile, shape), b_value, 0.0)
        )

    def where_weighted(self, i_tile: Any, b_weights: Any, b_value: Any) -> Any:
        """The tile with masked pairs, whose weights are 0, set to 0."""
        if self.block.params.bias:
            return self.unless_hidden(b_weights, b_value)
        if self.block.params.cap is not None or not self.block.params.has_mask:  # slopes of masked pairs may be NaN
            return self.where_visible(i_tile, b_value)
        return lax.cond(self.tile_range.whole(i_tile), lambda: b_value, lambda: jnp.where(b_weights == 0.0, 0.0, b_value))

    def unless_hidden(self, b_weights: Any, b_value: Any) -> Any:
        """The tile with pairs that the bias masks set to 0; their weights are 0."""
        return jnp.where(b_weights == 0.0, 0.0, b_value) if self.block.params.bias else b_value

    def bias(self, slot: Any) -> Any:
        """Wait for the bias of a tile, if there is one, and load it."""
        bias = self.block.plan.bias
        if bias is None:
            return None
        b_bias = load_bias_tile(bias, self.wait("bias", slot), self.block.wg)
        plgpu.commit_smem()  # order generic-proxy reads before the next TMA load
        self.release("bias", slot)
        return b_bias

    def ragged(self) -> bool:
        """Whether a tile may hold keys past the end, which need a mask; queries past the end have no gradient."""
        return not self.block.plan.by_key and self.block.params.keys % self.block.plan.other != 0

    def visible(self, i_tile: Any, shape: tuple[int, int]) -> Any:
        layout = plgpu.Layout.WGMMA
        start = i_tile * self.block.plan.other
        o_own = None
        if self.block.params.by_row:
            first = lax.optimization_barrier(self.first)  # else row indices stay in registers
            o_own = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=layout.reduce(1)) + first
        o_other = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout) + start
        token_info = {name: lax.broadcast_in_dim(b_info, shape, [0]) for name, b_info in self.token_info.items()}
        for name in self.block.params.token_info:
            if name not in token_info:
                b_info = self.block.load_token_info(name, self.coord, start, shape[1], layout.reduce(0))
                token_info[name] = lax.broadcast_in_dim(b_info, shape, [1])
        return self.block.params.visible(o_own, o_other, token_info, by_key=self.block.plan.by_key)

    def by_key(self, i_step: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gradients of keys and values from a tile of queries; scores are `[keys, queries]`."""
        block, plan, params = self.block, self.block.plan, self.block.params
        slot = self.slot(i_step)
        _, i_tile = self.tile_range.at(i_step)
        shape = (ROWS, plan.other)

        def columns(i_row: int) -> Any:
            b_row = plgpu.load(block.scratch["rows"].at[slot, i_row], layout=plgpu.Layout.WGMMA.reduce(0))
            return lax.broadcast_in_dim(b_row, shape, [1])

        own, own_value = self.factors()

        def with_scores(added: dict[str, Accumulator], s_query: Any, scores: Any) -> None:
            plgpu.wgmma(scores, own, s_query.transpose((1, 0)))
            s_grad = self.wait("other_value", slot)
            if "key" not in added:
                finish(added, s_query, s_grad, scores, None)
                return
            # Not 0.0: ptxas may take that from registers of the scores, and then waits for their wgmma (its remark C7517).
            b_start = plgpu.layout_cast(jnp.full(shape, -0.0, jnp.float32), plgpu.Layout.WGMMA)
            accumulate([b_start], functools.partial(with_both, added, s_query, s_grad, scores))

        def with_both(added: dict[str, Accumulator], s_query: Any, s_grad: Any, scores: Any, d_weights: Accumulator) -> None:
            d_weights.add(own_value, s_grad.transpose((1, 0)))
            finish(added, s_query, s_grad, scores, d_weights)

        def finish(added: dict[str, Accumulator], s_query: Any, s_grad: Any, scores: Any, d_weights: Any) -> None:
            b_logits = params.logits(plgpu.wgmma_accumulator_load(scores, wait_n=int("key" in added)), self.bias(slot))
            b_weights = self.where_visible(i_tile, jnp.exp2(b_logits * params.unit - columns(0)))
            if "value" in added:
                added["value"].add(b_weights.astype(plan.dtype), s_grad)
            if "key" in added:
                b_weights = self.sloped(b_weights, b_logits)
                b_d_weights = d_weights.value(outstanding=int("value" in added))
                b_d_logits = self.where_weighted(i_tile, b_weights, b_weights * (b_d_weights + columns(1)))
                added["key"].add(b_d_logits.astype(plan.dtype), s_query)
                if "value" in added:
                    if plan.waits_ahead:
                        self.wait_for(i_step + 1)
                    wait_for_wgmma(1)
                    self.release("other_value", slot)

        def issue_mmas(*accumulators: Accumulator) -> None:
            added = dict(zip(plan.wanted, accumulators, strict=True))
            s_query = block.scratch["other"].at[slot] if plan.waits_ahead else self.wait("other", slot)
            with_accumulator(shape, functools.partial(with_scores, added, s_query), accumulators)

        sums = tuple(accumulate(sums, issue_mmas))
        if len(plan.wanted) == 1:
            self.release("other_value", slot)
        self.release("other", slot)
        return sums

    def by_query(self, i_step: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gradients of queries from a tile of keys; scores are `[queries, keys]`."""
        plan, params = self.block.plan, self.block.params
        slot = self.slot(i_step)
        _, i_tile = self.tile_range.at(i_step)
        shape = (ROWS, plan.other)
        b_shift, b_start = (lax.broadcast_in_dim(b_row, shape, [0]) for b_row in self.statistics)

        own, own_value = self.factors()

        def with_scores(query_sum: Accumulator, s_key: Any, scores: Any) -> None:
            plgpu.wgmma(scores, own, s_key.transpose((1, 0)))
            s_value = self.wait("other_value", slot)
            accumulate([b_start], functools.partial(with_both, query_sum, s_key, s_value, scores))

        def with_both(query_sum: Accumulator, s_key: Any, s_value: Any, scores: Any, d_weights: Accumulator) -> None:
            d_weights.add(own_value, s_value.transpose((1, 0)))
            b_logits = params.logits(plgpu.wgmma_accumulator_load(scores, wait_n=1), self.bias(slot))
            b_weights = self.sloped(jnp.exp2(b_logits * params.unit - b_shift), b_logits)
            # Keep compilers from hoisting the wait for the other wgmma: the barrier stops MLIR, a branch stops ptxas.
            b_weights = lax.optimization_barrier(b_weights)
            if plan.waits_ahead:
                self.wait_for(i_step + 1)
            b_d_weights = d_weights.value(outstanding=0)
            self.release("other_value", slot)
            b_d_logits = self.where_visible(i_tile, self.unless_hidden(b_weights, b_weights * b_d_weights))
            query_sum.add(b_d_logits.astype(plan.dtype), s_key)

        def issue_mmas(query_sum: Accumulator) -> None:
            s_key = self.block.scratch["other"].at[slot] if plan.waits_ahead else self.wait("other", slot)
            with_accumulator(shape, functools.partial(with_scores, query_sum, s_key), [query_sum])

        sums = tuple(accumulate(sums, issue_mmas))
        self.release("other", slot)
        return sums

    def sloped(self, b_weights: Any, b_logits: Any) -> Any:
        """Weights times the derivative of the soft cap."""
        params = self.block.params
        return b_weights if params.cap is None else self.unless_hidden(b_weights, b_weights * params.slope(b_logits))
