"""Writes new keys and values into their KV pages in place, on TPU.

Pages stay in HBM, aliased as operands and results. A step loads a block of new tokens to VMEM, converts it to the page layout
and DMAs it to its slots. In token-major layouts it copies runs of consecutive tokens of a page. Otherwise a token is a row of a
register tile and copies are of whole tiles, which are loaded first and updated. Padding is preserved in the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.operations.paged_cache_update.interface import (
    OPERATION,
    PagedCacheUpdateCall,
    PagedCacheUpdateInputs,
    PagedCacheUpdateOutputs,
)
from ejkernel_pallas._call import compiler_params, cost_estimate, result_like
from ejkernel_pallas.tpu._integers import quotient, remainder
from ejkernel_pallas.tpu._pages import Pages, sources
from ejkernel_pallas.tpu.paged_cache_update.config import Config, blocks, chunk_rows, chunks_of_step, vmem_bytes
from ejkernel_pallas.tpu.paged_cache_update.schedule import Chunks, Runs, make_chunks, make_runs

NAME = "ejkernel_paged_cache_update"
PADDING = {"member": 0, "page": -1, "offset": 0, "low": 0, "high": 0}


def forward(call: PagedCacheUpdateCall, inputs: PagedCacheUpdateInputs, config: Config) -> PagedCacheUpdateOutputs:
    batch = call.key.shape[0]
    pages = [array for array in (inputs.key_pages, inputs.value_pages) if array is not None]
    if call.key.size * call.value.size * call.block_tables.size * pages[0].size == 0:
        # Nothing to write. The barrier shows in the program that this platform served the call.
        return PagedCacheUpdateOutputs(*jax.lax.optimization_barrier((inputs.key_pages, inputs.value_pages)))
    described = (inputs.query_start_loc, inputs.kv_lens, inputs.block_tables)
    starts, lengths, tables = (jnp.broadcast_to(array, (batch, *array.shape[1:])) for array in described)
    new, scales = _arranged(call, inputs)
    params = Params(call, sources(call), config, tuple(scale is not None for scale in scales))
    if params.token_major:
        runs = make_runs(call, starts, lengths, tables, config.slots)
        found = _launch(params, runs, runs.page.shape[0] // config.slots, new, scales, pages)
    else:
        chunks, count, token = make_chunks(call, starts, lengths, tables, chunk_rows(call))
        chunks = chunks._replace(
            **{name: _padded(getattr(chunks, name), params.chunks, value) for name, value in PADDING.items()}
        )
        token = _padded(token, params.chunks, 0)
        # [chunks, rows, K, D] to [chunks, K, rows, D]
        new = [jnp.swapaxes(array[chunks.member[:, None], token], 1, 2) for array in new]
        found = _launch(params, chunks, pl.cdiv(jnp.maximum(count, 1), params.chunks), new, scales, pages)
    return PagedCacheUpdateOutputs(found[0], None if call.value_pages is None else found[1])


def _padded(array: Any, unit: int, value: int) -> Any:
    return jnp.pad(array, ((0, -array.shape[0] % unit), *((0, 0),) * (array.ndim - 1)), constant_values=value)


def _arranged(call: PagedCacheUpdateCall, inputs: PagedCacheUpdateInputs) -> tuple[list[Any], list[Any]]:
    """New tokens `[b, N, rows, width]` for every page array, and their scales `[1|b, rows, width]` or None."""
    both = (inputs.key, inputs.value), (inputs.key_scale, inputs.value_scale)
    if call.value_pages is not None:
        shapes = [(source.rows, source.width) for source in sources(call)]
        return list(both[0]), [_per_channel(scale, shape) for scale, shape in zip(both[1], shapes, strict=True)]
    source, heads, size = sources(call)[0], *call.key.shape[2:]
    beside = call.layout == "side_by_side"
    rows, width = (source.rows, source.width // 2) if beside else (source.rows // 2, source.width)
    room = (0, 0), (0, 0), (0, rows - heads), (0, width - size)
    dtype = call.key.dtype if call.key.dtype == call.value.dtype else "float32"
    new = [jnp.pad(array.astype(dtype), room) for array in both[0]]
    shape = (*new[0].shape[:2], source.rows, source.width)
    arranged = jnp.concatenate(new, axis=3) if beside else jnp.stack(new, axis=3).reshape(shape)
    if inputs.key_scale is None and inputs.value_scale is None:
        return [arranged], [None]
    ones = jnp.ones((1, 1), jnp.float32)
    factors = [_per_channel(ones if scale is None else scale, (rows, width)) for scale in both[1]]
    batch = max(factor.shape[0] for factor in factors)
    factors = [jnp.broadcast_to(factor, (batch, *factor.shape[1:])) for factor in factors]
    if beside:
        return [arranged], [jnp.concatenate(factors, axis=2)]
    return [arranged], [jnp.stack(factors, axis=2).reshape(batch, source.rows, source.width)]


def _per_channel(scale: Any, shape: tuple[int, int]) -> Any:
    """`[1|b, 1|K]` as float32 `[1|b, rows, width]`, 1 for rows that are not in use."""
    if scale is None:
        return None
    rows, width = shape
    scale = scale.astype(jnp.float32)
    if scale.shape[1] > 1:
        scale = jnp.pad(scale, ((0, 0), (0, rows - scale.shape[1])), constant_values=1.0)
    return jnp.broadcast_to(scale[:, :, None], (scale.shape[0], rows, width))


@dataclasses.dataclass(frozen=True)
class Params:
    """Static parameters."""

    call: PagedCacheUpdateCall
    sources: tuple[Pages, ...]
    config: Config
    scaled: tuple[bool, ...]

    @property
    def token_major(self) -> bool:
        return self.sources[0].token_major

    @property
    def chunks(self) -> int:
        """Chunks of one step."""
        return chunks_of_step(self.call, self.config)

    @property
    def used(self) -> tuple[int, int, int]:
        """Used rows of fused pages, the period of their channels, and the used channels per period."""
        source, heads, size = self.sources[0], *self.call.key.shape[2:]
        if self.call.layout == "side_by_side":
            return heads, source.width // 2, size
        return 2 * heads, source.width, size

    @property
    def padded(self) -> bool:
        source, (rows, part, size) = self.sources[0], self.used
        return self.call.value_pages is None and (rows < source.rows or size < part)

    @property
    def reads(self) -> bool:
        """Whether a step must load slots because it preserves part of them."""
        return self.padded or not self.token_major


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of the grid. `before` and `after` are the same pages."""

    params: Params
    where: Any
    new: tuple[Any, ...]
    scales: tuple[Any, ...]
    after: tuple[Any, ...]
    stored: tuple[Any, ...]
    read: Any
    written: Any

    def run(self) -> None:
        if self.params.token_major:
            self._pipelined()
        else:
            pl.when(self.where.shared[0] == 0)(self._pipelined)
            pl.when(self.where.shared[0] != 0)(self._one_by_one)

    def _pipelined(self) -> None:
        """Software pipeline: convert a block while the previous one is written and the next one's slots are loaded."""
        i_step, steps = pl.program_id(0), pl.num_programs(0)
        slot, late = remainder(i_step, 2), 1 if self.params.reads else 2

        def wait(step: Any, slot: Any) -> None:
            self._copies(step, slot, lambda copy: copy.wait(), reading=False)

        def read(step: Any, slot: Any) -> None:
            self._copies(step, slot, lambda copy: copy.start(), reading=True)

        pl.when(i_step >= late)(lambda: wait(i_step - late, remainder(i_step - late, 2)))
        if self.params.reads:
            pl.when(i_step == 0)(lambda: read(i_step, slot))
            pl.when(i_step + 1 < steps)(lambda: read(i_step + 1, 1 - slot))
            self._copies(i_step, slot, lambda copy: copy.wait(), reading=True)
        for i_source in range(len(self.params.sources)):
            if self.params.token_major:
                self._store(i_source, slot)
            else:
                self._merge_all(i_source, i_step, slot)
        self._copies(i_step, slot, lambda copy: copy.start(), reading=False)
        last = i_step == steps - 1
        if late > 1:
            pl.when(last & (i_step > 0))(lambda: wait(i_step - 1, 1 - slot))
        pl.when(last)(lambda: wait(i_step, slot))

    def _one_by_one(self) -> None:
        """Process chunks serially, so that requests that share a chunk see each other's writes."""
        i_step = pl.program_id(0)

        def one(i_chunk: Any, _: None) -> None:
            for reading in (True, False):
                for act in (lambda copy: copy.start(), lambda copy: copy.wait()):
                    self._chunk(i_step, i_chunk, 0, act, reading)
                for i_source in range(len(self.params.sources) if reading else 0):
                    self._merge(i_source, i_step, i_chunk, 0)

        jax.lax.fori_loop(0, self.params.chunks, one, None)

    def _copies(self, step: Any, slot: Any, act: Callable[[Any], None], *, reading: bool) -> None:
        if self.params.token_major:
            self._runs(step, slot, act, reading)
        else:
            jax.lax.fori_loop(0, self.params.chunks, lambda i, _: self._chunk(step, i, slot, act, reading), None)

    def _between(self, i_source: int, at: Any, stored: Any, slot: Any, act: Callable[[Any], None], reading: bool) -> None:
        ends = self.after[i_source].at[at], self.stored[i_source].at[stored]
        semaphore = (self.read if reading else self.written).at[slot]
        source, target = ends if reading else ends[::-1]
        act(pltpu.make_async_copy(source, target, semaphore))

    def _runs(self, step: Any, slot: Any, act: Callable[[Any], None], reading: bool) -> None:
        runs, tile = self.where, self.params.config.slots
        first = step * tile
        member = quotient(step, runs.page.shape[0] // tile // self.params.call.key.shape[0])

        def run(token: Any) -> Any:
            size = runs.size[first + token]

            def copy(size: int) -> None:
                for i_source in range(len(self.params.sources)):
                    at = (member, runs.page[first + token], pl.ds(runs.offset[first + token], size))
                    self._between(i_source, at, (slot, pl.ds(token, size)), slot, act, reading)

            for power in range(tile.bit_length()):
                if 1 << power <= self.params.call.pages.page_size:
                    pl.when(size == 1 << power)(lambda size=1 << power: copy(size))
            return token + jnp.maximum(size, 1)

        jax.lax.while_loop(lambda token: token < tile, run, 0)

    def _chunk(self, step: Any, i_chunk: Any, slot: Any, act: Callable[[Any], None], reading: bool) -> None:
        chunks, rows = self.where, chunk_rows(self.params.call)
        index = step * self.params.chunks + i_chunk
        member, page = chunks.member[index], chunks.page[index]
        whole = rows == self.params.call.pages.page_size
        offset = pl.ds(0 if whole else pl.multiple_of(chunks.offset[index], rows), rows)

        def copy() -> None:
            for i_source, source in enumerate(self.params.sources):
                at = (member, slice(None), page, offset) if source.layout == "hptd" else (member, page, slice(None), offset)
                self._between(i_source, at, (slot, i_chunk), slot, act, reading)

        pl.when(page >= 0)(copy)

    def _store(self, i_source: int, slot: Any) -> None:
        """Convert the new block to the page layout, preserving padding."""
        params, stored = self.params, self.stored[i_source]
        scale = self._scale(i_source)
        new = _as_stored(self.new[i_source][...], None if scale is None else scale[...], stored.dtype)
        if params.padded:
            rows, part, size = params.used
            own = jax.lax.broadcasted_iota(jnp.int32, new.shape, 1) < rows
            channel = jax.lax.broadcasted_iota(jnp.int32, new.shape, 2)
            own &= jnp.where(channel < part, channel, channel - part) < size
            new = jnp.where(own, new, stored[slot].astype(jnp.float32).reshape(new.shape))
        stored[slot] = new.reshape(stored.shape[1:]).astype(stored.dtype)

    def _merge_all(self, i_source: int, step: Any, slot: Any) -> None:
        jax.lax.fori_loop(0, self.params.chunks, lambda i, _: self._merge(i_source, step, i, slot), None)

    def _merge(self, i_source: int, step: Any, i_chunk: Any, slot: Any) -> None:
        """Insert the new rows of a chunk, preserving the others."""
        stored, index = self.stored[i_source], step * self.params.chunks + i_chunk
        scale = self._scale(i_source)
        if scale is not None:
            scale = scale[self.where.member[index] if scale.shape[0] > 1 else 0][:, None]
        new = _as_stored(self.new[i_source][i_chunk], scale, stored.dtype)  # [K, rows, D]
        offset = jax.lax.broadcasted_iota(jnp.int32, new.shape, 1)
        own = (offset >= self.where.low[index]) & (offset < self.where.high[index])
        stored[slot, i_chunk] = jnp.where(own, new, stored[slot, i_chunk].astype(jnp.float32)).astype(stored.dtype)

    def _scale(self, i_source: int) -> Any:
        """`[rows, width]`, or those of all members."""
        return self.scales[sum(self.params.scaled[:i_source])] if self.params.scaled[i_source] else None


def _as_stored(new: Any, scale: Any, dtype: Any) -> Any:
    """Quantise in float32: round to nearest for int8, and clip to the range of 8-bit types."""
    new = new.astype(jnp.float32)
    new = new if scale is None else new / (scale[None] if scale.ndim < new.ndim else scale)
    if dtype == jnp.int8:
        return jnp.clip(jnp.round(jnp.where(new != new, 0.0, new)), -128, 127)
    if jnp.dtype(dtype).itemsize == 1:
        limit = float(jnp.finfo(dtype).max)
        return jnp.clip(new, -limit, limit)
    return new


def _launch(params: Params, where: Runs | Chunks, steps: Any, new: list[Any], scales: list[Any], pages: list[Any]) -> list[Any]:
    call, config = params.call, params.config
    given = [scale for scale in scales if scale is not None]
    columns, per_member = len(where), -(-call.key.shape[1] // config.slots)

    def at_new(step: Any, *refs: Any) -> tuple[Any, ...]:
        return (quotient(step, per_member), remainder(step, per_member), 0, 0) if params.token_major else (step, 0, 0, 0)

    def scale_block(scale: Any) -> pl.BlockSpec:
        if not params.token_major:  # a step has chunks of several members
            return pl.BlockSpec(scale.shape, lambda step, *refs: (0, 0, 0))

        def at(step: Any, *refs: Any) -> tuple[Any, ...]:
            return quotient(step, per_member) if scale.shape[0] > 1 else 0, 0, 0

        return pl.BlockSpec((None, *scale.shape[1:]), at)

    shapes = blocks(call, config)
    new_blocks = [pl.BlockSpec((None, *block) if params.token_major else block, at_new) for block, _ in shapes]
    hbm, count = pl.BlockSpec(memory_space=pl.ANY), len(pages)

    def kernel(*refs: Any) -> None:
        found = list(refs)
        columns_of, found = found[:columns], found[columns:]
        new_refs, found = tuple(found[:count]), found[count:]
        scale_refs, found = tuple(found[: len(given)]), found[len(given) + count :]
        after, stored, (read, written) = tuple(found[:count]), tuple(found[count : 2 * count]), found[2 * count :]
        Step(params, type(where)(*columns_of), new_refs, scale_refs, after, stored, read, written).run()

    counted = OPERATION.cost(call, "forward")
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=columns,
            grid=(steps,),
            in_specs=[*new_blocks, *(scale_block(scale) for scale in given), *[hbm] * count],
            out_specs=[hbm] * count,
            scratch_shapes=[
                *(pltpu.VMEM((2, *stored), jnp.dtype(call.key_pages.dtype)) for _, stored in shapes),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[result_like(array, array.shape, array.dtype) for array in pages],
        input_output_aliases={columns + count + len(given) + i: i for i in range(count)},
        compiler_params=compiler_params(NAME, ("arbitrary",), vmem_bytes(call, config)),
        cost_estimate=cost_estimate(counted.flops, 0, counted.bytes),
        name=NAME,
    )(*where, *new, *given, *pages)
