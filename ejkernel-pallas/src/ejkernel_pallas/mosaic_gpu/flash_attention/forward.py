"""The forward kernel: a producer warpgroup issues TMA loads of key and value tiles; the consumers own 64 queries each.

A consumer computes scores `[64, BK]` from shared memory, turns them into weights in registers and multiplies those with values
into an accumulator `[64, V]`. All consumers of a block visit the same tiles. With `overlap`, the next QK MMA is issued before
the previous PV MMA, so that the exponentials of one overlap the other, else after it; with `ping_pong`, consumers alternate in
issuing the two. TMA fills out-of-bounds elements with zeros and does not store them.

With grouped-query attention a consumer may own several query heads of few tokens (`packed`), with rows ordered by token, then
head.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel_pallas._jax_interpreter import gpu_interpreter_is_on
from ejkernel_pallas.mosaic_gpu._call import (
    Accumulator,
    accumulate,
    call_kernel,
    ping_pong_arrive,
    ping_pong_barriers,
    ping_pong_wait,
    swizzled_smem,
    wgmma_accumulate,
    with_accumulator,
)
from ejkernel_pallas.mosaic_gpu.flash_attention.bias import BiasTiles
from ejkernel_pallas.mosaic_gpu.flash_attention.bias_loads import bias_scratch, copy_bias_tile, load_bias_tile
from ejkernel_pallas.mosaic_gpu.flash_attention.config import ForwardConfig
from ejkernel_pallas.mosaic_gpu.flash_attention.mask_params import LN_2, MaskParams
from ejkernel_pallas.mosaic_gpu.flash_attention.shape import REGISTERS, ROWS
from ejkernel_pallas.mosaic_gpu.flash_attention.tile_scheduler import TileCoordinate, TileScheduler

SWIZZLE_COLUMNS = 64
"""Columns of the 128-byte swizzle."""


@dataclasses.dataclass(frozen=True)
class Forward:
    """Static parameters of the kernel.

    Attributes:
        params, config: of the call.
        scheduler: tile scheduler.
        size, value_size: padded head sizes.
        dtype: of query, key and value.
        ranges: whether tile ranges are loaded from an array.
        sinks: whether maxima and sums start from sinks.
        packed: query heads of a key head that share a consumer (pack GQA); 1 = rows are tokens of one head. Query and output
            are `[B, T, key heads, packed, size]`, T a multiple of a block's tokens.
        save_lse: whether the log-sum-exp is an output.
        bias: the tiles of the bias, if there is one.
        query_slots: query blocks in shared memory.
    """

    params: MaskParams
    config: ForwardConfig
    scheduler: TileScheduler
    size: int
    value_size: int
    dtype: Any
    ranges: bool
    sinks: bool
    save_lse: bool
    packed: int = 1
    bias: BiasTiles | None = None
    query_slots: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a consumer."""
        return ROWS // self.packed

    @property
    def reuses_query_smem(self) -> bool:
        """Whether a consumer's output reuses the shared memory of its queries."""
        return not self.config.persistent and self.value_size <= self.size

    @property
    def splits_output(self) -> bool:
        """Whether it is narrower, and therefore stored in pieces of `SWIZZLE_COLUMNS` columns."""
        return self.reuses_query_smem and self.value_size < self.size

    def scratch(self) -> dict[str, Any]:
        c = self.config
        barrier = functools.partial(plgpu.Barrier, num_barriers=c.num_stages)
        queries = self.query_slots * c.warpgroups
        query = swizzled_smem((queries, ROWS, self.size), self.dtype)
        if self.splits_output:
            query = plgpu.RefUnion(
                query, swizzled_smem((c.warpgroups * (self.size // SWIZZLE_COLUMNS), ROWS, SWIZZLE_COLUMNS), self.dtype)
            )
        held = {
            "query": query,
            "key": swizzled_smem((c.num_stages, c.block_k, self.size), self.dtype),
            "value": swizzled_smem((c.num_stages, c.block_k, self.value_size), self.dtype),
            "query_full": plgpu.Barrier(num_barriers=queries, num_arrivals=self.tokens if self.packed > 1 else 1),
            "key_full": barrier(),
            "value_full": barrier(),
            "key_empty": barrier(num_arrivals=c.warpgroups),
            "value_empty": barrier(num_arrivals=c.warpgroups),
        }
        if not self.reuses_query_smem:
            held["out"] = swizzled_smem((c.warpgroups, ROWS, self.value_size), self.dtype)
        if c.persistent:
            held["query_empty"] = plgpu.Barrier(num_barriers=queries)
        if c.ping_pong:
            held |= ping_pong_barriers(c.warpgroups)
        if self.save_lse:
            held["lse"] = plgpu.SMEM((c.warpgroups, ROWS), jnp.float32)
        return held if self.bias is None else held | bias_scratch(self.bias)

    @property
    def rings(self) -> tuple[str, ...]:
        """Arrays with a TMA load per tile."""
        return ("key", "value") if self.bias is None else ("key", "bias", "value")

    def body(self, *refs: Any, **scratch: Any) -> None:
        """The kernel body: references to the inputs of `launch`, then outputs."""
        _Block(self, refs, scratch).run()


class _Block:
    """One thread block."""

    def __init__(self, plan: Forward, refs: tuple[Any, ...], scratch: dict[str, Any]) -> None:
        self.plan, self.params, self.config = plan, plan.params, plan.config
        rest = list(refs)
        self.query, self.key, self.value = (rest.pop(0) for _ in range(3))
        self.token_info = {name: rest.pop(0) for name in self.params.token_info}
        self.bias = rest.pop(0) if plan.bias else None
        self.ranges = rest.pop(0) if plan.ranges else None
        self.sinks = rest.pop(0) if plan.sinks else None
        self.assignment = rest.pop(0) if plan.scheduler.assignment is not None else None
        self.out = rest.pop(0)
        self.lse = rest.pop(0) if plan.save_lse else None
        self.s_query, self.s_pieces = scratch["query"] if plan.splits_output else (scratch["query"], None)
        self.s_out = self.s_query if plan.reuses_query_smem else scratch["out"]
        self.scratch = scratch
        self.wg = lax.axis_index("wg")

    def run(self) -> None:
        consumer, producer = REGISTERS[self.config.warpgroups]

        @pl.when(self.wg < self.config.warpgroups)
        def _consume() -> None:
            plgpu.set_max_registers(consumer, action="increase")
            if self.config.ping_pong:  # the first consumer goes first
                pl.when(self.wg == self.config.warpgroups - 1)(self.ping_pong_arrive)
            if self.config.persistent:
                for i_slot in range(self.plan.query_slots):
                    plgpu.barrier_arrive(self.scratch["query_empty"].at[i_slot * self.config.warpgroups + self.wg])
            self.plan.scheduler.loop(self.consume, self.assignment)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if self.config.ping_pong:  # and absorbs the last, unused arrival
                pl.when(self.wg == 0)(self.ping_pong_wait)

        @pl.when(self.wg == self.config.warpgroups)
        def _produce() -> None:
            plgpu.set_max_registers(producer, action="decrease")
            self.drain(self.plan.scheduler.loop(self.produce, self.assignment))

    def range_of(self, coord: Any) -> tuple[Any, Any, Any, Any]:
        block_q = self.config.warpgroups * self.plan.tokens
        if self.ranges is None:
            first = coord.block * block_q
            return self.params.key_range(first, first + (block_q - 1), self.config.block_k)
        i_batch = coord.batch if self.ranges.shape[0] > 1 else 0
        return tuple(self.ranges[i_batch, coord.block, end] for end in range(4))  # pyright: ignore[reportReturnType]

    def produce(self, coord: Any, done: Any) -> Any:
        """Issue the TMA loads of one block; `done` tiles were loaded before. Returns the new count."""
        c = self.config
        low, _, _, high = self.range_of(coord)
        i_key_head = coord.head if self.plan.packed > 1 else lax.div(coord.head, jnp.int32(self.params.group))
        if c.persistent:
            for wg in range(c.warpgroups):
                plgpu.barrier_wait(self.scratch["query_empty"].at[self.query_slot(coord, wg)])
                self.copy_query(coord, wg)

        def copy(name: str, i_key: Any, slot: Any, fresh: Any) -> None:
            @pl.when(jnp.logical_not(fresh))
            def _() -> None:
                plgpu.barrier_wait(self.scratch[f"{name}_empty"].at[slot])

            s_tile, full = self.scratch[name].at[slot], self.scratch[f"{name}_full"].at[slot]
            bias = self.plan.bias
            if bias is not None and name == "bias":
                first = coord.block * (c.warpgroups * ROWS)
                copy_bias_tile(bias, self.bias, bias.row(coord.batch, coord.head), first, i_key * c.block_k, s_tile, full)
                return
            source = self.key if name == "key" else self.value
            plgpu.copy_gmem_to_smem(source.at[coord.batch, pl.ds(i_key * c.block_k, c.block_k), i_key_head], s_tile, full)

        def step(i_tile: Any, _: Any) -> None:
            count = done + i_tile
            slot, fresh = lax.rem(count, jnp.int32(c.num_stages)), count < c.num_stages
            for name in self.plan.rings:
                copy(name, low + i_tile, slot, fresh)

        lax.fori_loop(0, high - low, step, None)  # from a constant: one that was read varies over a mesh, one more does not
        return done + (high - low)

    def drain(self, done: Any) -> None:
        """Wait until consumers have released all tiles, so that every mbarrier phase is observed."""
        for slot in range(self.config.num_stages):
            for name in self.plan.rings:
                pl.when(done > slot)(functools.partial(plgpu.barrier_wait, self.scratch[f"{name}_empty"].at[slot]))
        if self.config.persistent:
            for i_slot in range(self.plan.query_slots * self.config.warpgroups):
                plgpu.barrier_wait(self.scratch["query_empty"].at[i_slot])

    def query_slot(self, coord: TileCoordinate, wg: Any) -> Any:
        """Buffer index of a consumer's queries of a block."""
        slots = self.plan.query_slots
        return wg if slots == 1 else lax.rem(coord.iteration, jnp.int32(slots)) * self.config.warpgroups + wg

    def copy_query(self, coord: TileCoordinate, wg: Any) -> None:
        slot = self.query_slot(coord, wg)
        first = (coord.block * self.config.warpgroups + wg) * self.plan.tokens
        for rows, source in self.rows_of(self.query, coord, first):
            plgpu.copy_gmem_to_smem(source, self.s_query.at[slot, rows], self.scratch["query_full"].at[slot])

    def rows_of(self, array: Any, coord: TileCoordinate, first: Any) -> Iterator[tuple[Any, Any]]:
        """Contiguous pieces of a consumer's rows: the rows, and their location in queries or output."""
        if self.plan.packed == 1:
            yield pl.ds(0, ROWS), array.at[coord.batch, pl.ds(first, ROWS), coord.head]
            return
        for i_token in range(self.plan.tokens):
            yield pl.ds(i_token * self.plan.packed, self.plan.packed), array.at[coord.batch, first + i_token, coord.head]

    def ping_pong_arrive(self) -> None:
        ping_pong_arrive(self.scratch, lax.rem(self.wg + 1, jnp.int32(self.config.warpgroups)))

    def ping_pong_wait(self) -> None:
        ping_pong_wait(self.scratch, self.wg)

    def consume(self, coord: Any, done: Any) -> Any:
        """Compute the output of this warpgroup's queries of one block."""
        c = self.config
        low, full_low, full_high, high = self.range_of(coord)
        first = (coord.block * c.warpgroups + self.wg) * self.plan.tokens
        if not c.persistent:
            self.copy_query(coord, self.wg)
        rows = plgpu.Layout.WGMMA.reduce(1)
        b_info = {
            name: plgpu.load(self.load_token_info(name, coord, first, ROWS), layout=rows, optimized=False)
            for name in self.params.token_info
            if name.startswith("query")
        }
        b_max, b_sum = self.start_of(coord)
        b_max = plgpu.layout_cast(jnp.full((ROWS,), b_max, jnp.float32), rows)
        b_sum = plgpu.layout_cast(jnp.full((ROWS,), b_sum, jnp.float32), rows)
        slot = self.query_slot(coord, self.wg)
        plgpu.barrier_wait(self.scratch["query_full"].at[slot])
        query = self.s_query.at[slot]
        if c.query_in_registers and not gpu_interpreter_is_on():  # whose MMAs take no register operands
            query = plgpu.load(query, layout=plgpu.Layout.WGMMA)
        tile = _KeyLoop(self, coord, first, query, b_info, low, full_low, full_high, high, done)
        zeros = jnp.zeros((ROWS, self.plan.value_size), jnp.float32)
        state = (plgpu.layout_cast(zeros, plgpu.Layout.WGMMA), b_max, b_sum)
        self.finish(coord, first, *tile.loop(state))
        return done + (high - low)

    def load_token_info(self, name: str, coord: Any, first: Any, count: int) -> Any:
        array = self.token_info[name]
        return array.at[coord.batch if array.shape[0] > 1 else 0, pl.ds(first, count)]

    def start_of(self, coord: Any) -> tuple[Any, Any]:
        """Initial maximum and sum: those of the sinks."""
        if self.sinks is None:
            return (0.0 if self.params.bounded else -jnp.inf), 0.0
        i_batch = coord.batch if self.sinks.shape[0] > 1 else 0
        return self.sinks[i_batch, coord.head, 0], self.sinks[i_batch, coord.head, 1]

    def finish(self, coord: Any, first: Any, b_acc: Any, b_max: Any, b_sum: Any) -> None:
        b_empty = b_sum == 0.0
        b_divisor = jnp.where(b_empty, 1.0, b_sum)
        b_out = b_acc * lax.broadcast_in_dim(1.0 / b_divisor, b_acc.shape, [0])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        b_out = b_out.astype(self.plan.dtype)
        pieces = [(self.s_out.at[self.wg], pl.ds(0, self.plan.value_size), b_out)]
        if self.s_pieces is not None:
            i_split = self.wg * (self.plan.size // SWIZZLE_COLUMNS)
            starts = range(0, self.plan.value_size, SWIZZLE_COLUMNS)
            pieces = [
                (self.s_pieces.at[i_split + i], pl.ds(start, SWIZZLE_COLUMNS), b_out[:, start : start + SWIZZLE_COLUMNS])
                for i, start in enumerate(starts)
            ]
        plgpu.commit_smem()  # all warps have read the queries that the output overwrites
        for s_piece, _, b_piece in pieces:
            s_piece[...] = b_piece
        if self.lse is not None:
            b_lse = (b_max * self.params.unit + jnp.log2(b_divisor)) * LN_2
            self.scratch["lse"].at[self.wg][...] = jnp.where(b_empty, -jnp.inf, b_lse)
        plgpu.commit_smem()
        for rows, out in self.rows_of(self.out, coord, first):
            for s_piece, columns, _ in pieces:
                plgpu.copy_smem_to_gmem(s_piece.at[rows], out.at[:, columns], commit_group=False)
        if self.lse is not None:
            lse = self.lse.at[coord.batch, coord.head, pl.ds(first * self.plan.packed, ROWS)]
            plgpu.copy_smem_to_gmem(self.scratch["lse"].at[self.wg], lse, commit_group=False)
        plgpu.commit_smem_to_gmem_group()


@dataclasses.dataclass
class _KeyLoop:
    """The loop of one warpgroup over the key tiles [low, high)."""

    block: _Block
    coord: Any
    first: Any
    query: Any
    token_info: dict[str, Any]
    low: Any
    full_low: Any
    full_high: Any
    high: Any
    done: Any

    def wait(self, name: str, i_key: Any) -> Any:
        """Wait for a tile. Returns its reference."""
        slot = self.slot(i_key)
        plgpu.barrier_wait(self.block.scratch[f"{name}_full"].at[slot])
        return self.block.scratch[name].at[slot]

    @property
    def waits_ahead(self) -> bool:
        """Whether a consumer waits for the next key tile while it processes the current one: not with one stage."""
        return self.block.config.num_stages > 1

    def wait_for_next(self, i_key: Any) -> None:
        """Wait for the next key tile, if there is one."""
        if not self.waits_ahead:
            return

        @pl.when(i_key + 1 < self.high)
        def _() -> None:
            self.wait("key", i_key + 1)

    def release(self, name: str, i_key: Any) -> None:
        plgpu.barrier_arrive(self.block.scratch[f"{name}_empty"].at[self.slot(i_key)])

    def slot(self, i_key: Any) -> Any:
        return lax.rem(self.done + (i_key - self.low), jnp.int32(self.block.config.num_stages))

    def ping_pong_wait(self) -> None:
        if self.block.config.ping_pong:
            self.block.ping_pong_wait()

    def ping_pong_arrive(self) -> None:
        if self.block.config.ping_pong:
            self.block.ping_pong_arrive()

    def release_query(self) -> None:
        """Release the queries, so that the next block's can be loaded."""
        if self.block.config.persistent:
            plgpu.barrier_arrive(self.block.scratch["query_empty"].at[self.block.query_slot(self.coord, self.block.wg)])

    def masked_logits(self, i_key: Any, b_qk: Any) -> Any:
        """Logits, -inf for masked pairs."""
        params = self.block.params
        b_logits = params.logits(b_qk, self.bias(i_key))
        if not params.has_mask and params.keys % self.block.config.block_k == 0:
            return b_logits
        whole = (i_key >= self.full_low) & (i_key < self.full_high)
        return lax.cond(whole, lambda: b_logits, lambda: jnp.where(self.visible(i_key, b_qk.shape), b_logits, -jnp.inf))

    def bias(self, i_key: Any) -> Any:
        """Wait for the bias of a tile, if there is one, and load it."""
        bias = self.block.plan.bias
        if bias is None:
            return None
        b_bias = load_bias_tile(bias, self.wait("bias", i_key), self.block.wg)
        plgpu.commit_smem()  # order generic-proxy reads before the next TMA load
        self.release("bias", i_key)
        return b_bias

    def visible(self, i_key: Any, shape: tuple[int, int]) -> Any:
        layout = plgpu.Layout.WGMMA
        start = i_key * self.block.config.block_k
        o_query = None
        if self.block.params.by_row:
            o_query = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=layout.reduce(1))
            if self.block.plan.packed > 1:
                o_query = lax.div(o_query, jnp.full_like(o_query, self.block.plan.packed))
            o_query = o_query + self.first
        o_key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout) + start
        token_info = {name: lax.broadcast_in_dim(b_info, shape, [0]) for name, b_info in self.token_info.items()}
        for name in self.block.params.token_info:
            if name.startswith("key"):
                source = self.block.load_token_info(name, self.coord, start, shape[1])
                token_info[name] = lax.broadcast_in_dim(
                    plgpu.load(source, layout=layout.reduce(0), optimized=False), shape, [1]
                )
        return self.block.params.visible(o_query, o_key, token_info, by_key=False)

    def online_softmax_update(self, b_logits: Any, b_max: Any, b_sum: Any) -> tuple[Any, Any, Any, Any]:
        """Online-softmax update: weights of a tile, new maximum and sum, and the rescale factor of the accumulator. Bounded
        weights are relative to 0, and the factor is unused."""
        unit = self.block.params.unit
        if self.block.params.bounded:
            b_weights = jnp.exp2(b_logits * unit)
            return b_weights, b_max, b_sum + b_weights.sum(axis=1), b_max
        b_new = jnp.maximum(b_max, b_logits.max(axis=1))
        b_shift = b_new
        if self.block.params.has_mask_or_bias:  # -inf - -inf is NaN
            b_shift = jnp.where(b_new == -jnp.inf, 0.0, b_new)
        b_scaled = b_shift * unit
        b_rescale = jnp.exp2(b_max * unit - b_scaled)
        b_weights = jnp.exp2(b_logits * unit - lax.broadcast_in_dim(b_scaled, b_logits.shape, [0]))
        return b_weights, b_new, b_sum * b_rescale + b_weights.sum(axis=1), b_rescale

    def loop(self, state: Any) -> Any:
        """Run the loop on the initial accumulator, maximum and sum. Returns the final ones."""
        dtype = self.block.plan.dtype

        def begin() -> Any:
            b_acc, b_max, b_sum = state
            self.wait("key", self.low)
            self.ping_pong_wait()
            b_qk = with_accumulator(self.shape, functools.partial(self.first_scores, self.low), [])
            b_weights, b_max, b_sum, _ = self.online_softmax_update(self.masked_logits(self.low, b_qk), b_max, b_sum)
            return b_acc, b_max, b_sum, b_weights.astype(dtype)

        def step(i_tile: Any, carry: Any) -> Any:
            i_key = self.low + i_tile
            b_acc, b_max, b_sum, b_half = carry
            both = self.overlapped if self.block.config.overlap else self.sequential
            b_next, b_weights, b_new, b_total, b_rescale = both(i_key, b_acc, b_max, b_sum, b_half)
            self.release("value", i_key - 1)
            if not self.block.params.bounded:
                b_next = b_next * lax.broadcast_in_dim(b_rescale, b_next.shape, [0])
            return b_next, b_new, b_total, b_weights.astype(dtype)

        def end(carry: Any) -> Any:
            b_acc, b_max, b_sum, b_half = carry
            s_value = self.wait("value", self.high - 1)
            b_acc = wgmma_accumulate(b_acc, b_half, s_value)
            self.release("value", self.high - 1)
            return b_acc, b_max, b_sum

        def some() -> Any:
            carry = lax.fori_loop(1, self.high - self.low, step, begin())
            self.release_query()
            return end(carry)

        def none() -> Any:
            self.release_query()
            return state

        return lax.cond(self.low < self.high, some, none)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a score tile."""
        return ROWS, self.block.config.block_k

    def first_scores(self, i_key: Any, scores: Any) -> Any:
        """Compute the scores of the first tile."""
        plgpu.wgmma(scores, self.query, self.block.scratch["key"].at[self.slot(i_key)].transpose((1, 0)))
        self.ping_pong_arrive()
        self.wait_for_next(i_key)
        b_qk = plgpu.wgmma_accumulator_load(scores, wait_n=0)
        self.release("key", i_key)
        return b_qk

    def next_key(self, i_key: Any) -> Any:
        """A key tile after the first."""
        return self.block.scratch["key"].at[self.slot(i_key)] if self.waits_ahead else self.wait("key", i_key)

    def sequential(self, i_key: Any, b_acc: Any, b_max: Any, b_sum: Any, b_half: Any) -> list[Any]:
        """The previous tile's PV MMA, then this tile's QK MMA, then its softmax."""

        def scored(total: Accumulator, s_key: Any, scores: Any) -> Any:
            plgpu.wgmma(scores, self.query, s_key.transpose((1, 0)))
            self.ping_pong_arrive()
            self.wait_for_next(i_key)
            b_qk = plgpu.wgmma_accumulator_load(scores, wait_n=0)
            self.release("key", i_key)
            return (b_qk,)

        def issue_mmas(total: Accumulator) -> Any:
            total.add(b_half, s_value)
            s_key = self.next_key(i_key)
            return with_accumulator(self.shape, functools.partial(scored, total, s_key), [total])

        s_value = self.wait("value", i_key - 1)
        self.ping_pong_wait()
        b_next, b_qk = accumulate([b_acc], issue_mmas, results=[self.shape])
        return [b_next, *self.online_softmax_update(self.masked_logits(i_key, b_qk), b_max, b_sum)]

    def overlapped(self, i_key: Any, b_acc: Any, b_max: Any, b_sum: Any, b_half: Any) -> list[Any]:
        """This tile's QK MMA overlaps the previous tile's PV MMA."""
        s_key = self.next_key(i_key)

        def weights(total: Accumulator, scores: Any) -> tuple[Any, ...]:
            plgpu.wgmma(scores, self.query, s_key.transpose((1, 0)))
            s_value = self.wait("value", i_key - 1)
            total.add(b_half, s_value)
            self.ping_pong_arrive()
            b_qk = plgpu.wgmma_accumulator_load(scores, wait_n=1)
            self.release("key", i_key)
            # Wait for the PV MMA after the softmax. Compilers hoist the wait: an optimization barrier stops MLIR, a branch
            # stops ptxas. Weights converted before the wait would make ptxas serialise all wgmmas (its remark C7513).
            updated = lax.optimization_barrier(self.online_softmax_update(self.masked_logits(i_key, b_qk), b_max, b_sum))
            self.wait_for_next(i_key)
            return updated

        self.ping_pong_wait()
        return accumulate(
            [b_acc],
            lambda total: with_accumulator(self.shape, functools.partial(weights, total), [total]),
            results=[self.shape, (ROWS,), (ROWS,), (ROWS,)],
        )


def launch(plan: Forward, arrays: list[Any], results: list[tuple[tuple[int, ...], Any]]) -> list[jax.Array]:
    """Run the kernel on query, key, value, token info, bias, ranges, sinks and the scheduler's assignment, as far as present."""
    if plan.scheduler.assignment is not None:
        arrays = [*arrays, jnp.asarray(plan.scheduler.assignment)]
    kernel = call_kernel(
        plan.body,
        name="ejkernel_flash_attention",
        results=results,
        like=arrays[0],
        grid={"block": plan.scheduler.programs},
        warpgroups=plan.config.warpgroups + 1,
        scratch=plan.scratch(),
        unsafe_no_auto_barriers=True,
    )
    return kernel(*arrays)
