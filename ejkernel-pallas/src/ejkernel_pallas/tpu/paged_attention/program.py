"""The program of one work item: manual DMAs prefetch its pages one step ahead of the matmuls.

Page buffers are double-buffered: each step prefetches the next step's pages, the last step of an item those of the next item,
so that short requests do not wait either. Invisible pages are not loaded.

Rows of a matmul are the query heads of one key head, and for each the tokens of the item. Logits are base-2 exponents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas.tpu._integers import remainder
from ejkernel_pallas.tpu._pages import Pages
from ejkernel_pallas.tpu._vmem import LANES
from ejkernel_pallas.tpu.paged_attention.work import Params, Scalars, Work

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
MASKED, NONFINITE = 1, 2
"""Codes of non-finite values in `qq_bias`: -inf, and NaN or inf."""
_CHUNK = 64
"""Tokens whose heads are deinterleaved at once."""


class Scratch(NamedTuple):
    """VMEM and semaphores. Sources are the page arrays: keys and values, or one fused array.

    steps: steps that this core has completed; queries `[2, tokens, H, D]` and results `[tokens, H, V]` as in HBM, and
    query_rows and result_rows with heads as float32 rows in tiles of 128 lanes; pages of every source, double-buffered, and
    deinterleaved by heads if they are token-major; query `[passes, rows, D]`, row_max and row_sum `[.., 128]` and acc `[..,
    V]`: online-softmax state; page_valid `[1, keys]`: 0 where a page is missing; bias and code `[tokens, keys]`.
    """

    steps: Any
    queries: Any
    query_rows: Any
    results: Any
    result_rows: Any
    pages: tuple[Any, ...]
    deinterleaved: tuple[Any, ...]
    query: Any
    row_max: Any
    row_sum: Any
    acc: Any
    page_valid: Any
    bias: tuple[Any, ...]
    query_copied: Any
    pages_copied: Any
    result_copied: Any


class Blocks(NamedTuple):
    """References to operands and results. Query, pages and out are in HBM."""

    query: Any
    pages: tuple[Any, ...]
    sinks: Any
    slopes: Any
    bias: Any
    code: Any
    out: Any
    lse: Any


def _put_rows(ref: Any, where: Any, rows: Any) -> None:
    """Store rows `[n, width]` as `[tiles of 128 lanes, rows, lanes]`: strided accesses need such tiles."""
    tiles, _, lanes = ref.shape
    if tiles * lanes > rows.shape[1]:
        rows = jnp.pad(rows, ((0, 0), (0, tiles * lanes - rows.shape[1])))
    for i_tile in range(tiles):
        ref[i_tile, where] = rows[:, i_tile * lanes : (i_tile + 1) * lanes]


def _get_rows(ref: Any, where: Any) -> Any:
    tiles = [ref[i_tile, where] for i_tile in range(ref.shape[0])]
    return tiles[0] if len(tiles) == 1 else jnp.concatenate(tiles, axis=1)


def _exact(left: Any, right: Any) -> Any:
    return jnp.dot(left, right, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class Program:
    """One work item. `tokens` is static: 1 or the height of a tile."""

    params: Params
    scalars: Scalars
    blocks: Blocks
    scratch: Scratch

    def run(self) -> None:
        i_item = pl.program_id(1) * self.params.cores + pl.program_id(0)
        pl.when(i_item < self.scalars.count[0])(lambda: self._item(self._work(i_item)))

    def _work(self, item: Any) -> Work:
        return Work(self.params, self.scalars, item)

    def _item(self, work: Work) -> None:
        def begin() -> None:
            self.scratch.steps[0] = 0
            self._start_query(work, 0)
            self._start_pages(work, 0, 0)

        pl.when(pl.program_id(1) == 0)(begin)
        if self.params.shape.tokens == 1:
            self._attend(work, 1)
        else:
            pl.when(work.single)(lambda: self._attend(work, 1))
            pl.when(jnp.logical_not(work.single))(lambda: self._attend(work, self.params.shape.tokens))

    def _attend(self, work: Work, tokens: int) -> None:
        following, slot = self._work(work.item + self.params.cores), remainder(pl.program_id(1), 2)
        more = following.item < self.scalars.count[0]
        done = self.scratch.steps[0]
        pl.when(more)(lambda: self._start_query(following, 1 - slot))
        self._stage_query(work, slot, tokens)
        self._clear(tokens)

        def step(i_step: Any, _: None) -> None:
            buffer = remainder(done + i_step, 2)
            last = i_step == work.steps - 1
            pl.when(jnp.logical_not(last))(lambda: self._start_pages(work, i_step + 1, 1 - buffer))
            pl.when(last & more)(lambda: self._start_pages(following, 0, 1 - buffer))
            self._wait_pages(work, i_step, buffer)
            self._deinterleave(buffer)
            whole = work.seen_by_all(i_step) & work.is_full(i_step)
            pl.when(whole)(lambda: self._update(work, i_step, buffer, tokens, edge=False))
            pl.when(jnp.logical_not(whole))(lambda: self._update_masked(work, i_step, buffer, tokens))

        jax.lax.fori_loop(0, work.steps, step, None)
        self.scratch.steps[0] = done + work.steps
        self._finish(work, tokens, more)

    # Copies

    def _query_copy(self, work: Work, slot: Any, tokens: int) -> Any:
        source = self.blocks.query.at[work.member, pl.ds(work.base, tokens)]
        target = self.scratch.queries.at[slot, pl.ds(0, tokens)]
        return pltpu.make_async_copy(source, target, self.scratch.query_copied.at[slot])

    def _start_query(self, work: Work, slot: Any) -> None:
        if self.params.shape.tokens == 1:
            self._query_copy(work, slot, 1).start()
            return
        pl.when(work.single)(lambda: self._query_copy(work, slot, 1).start())
        pl.when(jnp.logical_not(work.single))(lambda: self._query_copy(work, slot, self.params.shape.tokens).start())

    def _page_copies(self, work: Work, place: Any, page: Any, buffer: Any) -> Iterator[Any]:
        size = self.params.page_size
        for source, pages, copied in zip(self.params.sources, self.blocks.pages, self.scratch.pages, strict=True):
            member = work.member if source.shape[0] > 1 else 0
            to = copied.at[buffer, pl.ds(place * size, size)] if source.token_major else copied.at[buffer, place]
            yield pltpu.make_async_copy(pages.at[source.at(member, page)], to, self.scratch.pages_copied.at[buffer])

    def _each_page(self, work: Work, step: Any, buffer: Any, act: Callable[[Any], None]) -> None:
        """`act` on the copies of every page of a step that there is."""
        first, count = work.pages_of(step)

        def one(place: Any, _: None) -> None:
            page, there = work.page(first + place)

            def copies() -> None:
                for each in self._page_copies(work, place, page, buffer):
                    act(each)

            pl.when(there)(copies)

        jax.lax.fori_loop(0, count, one, None)

    def _start_pages(self, work: Work, step: Any, buffer: Any) -> None:
        self._each_page(work, step, buffer, lambda copy: copy.start())

    def _wait_pages(self, work: Work, step: Any, buffer: Any) -> None:
        """For the bytes of a whole buffer, or for one page after the other."""
        full = work.is_full(step)

        def whole() -> None:
            for copied in self.scratch.pages:
                pltpu.make_async_copy(copied.at[buffer], copied.at[buffer], self.scratch.pages_copied.at[buffer]).wait()

        pl.when(full)(whole)
        pl.when(jnp.logical_not(full))(lambda: self._each_page(work, step, buffer, lambda copy: copy.wait()))

    def _result_copies(self, work: Work) -> Iterator[tuple[Any, Any]]:
        """Whether there is one, and a copy, of each power of two in the number of the item's tokens."""
        count, size = work.high - work.low, self.params.shape.tokens
        done = 0
        while size:
            size = 1 << (size.bit_length() - 1)
            source = self.scratch.results.at[pl.ds(work.low + done, size)]
            target = self.blocks.out.at[work.member, pl.ds(work.base + work.low + done, size)]
            yield (count & size) > 0, pltpu.make_async_copy(source, target, self.scratch.result_copied.at[0])
            done = done + (count & size)
            size //= 2

    # Layouts

    def _stage_query(self, work: Work, slot: Any, tokens: int) -> None:
        """Reorder queries by pass, head and token."""
        scratch, shape = self.scratch, self.params.shape
        self._query_copy(work, slot, tokens).wait()
        *_, heads, size = scratch.queries.shape
        rows = scratch.queries[slot, pl.ds(0, tokens)].astype(jnp.float32).reshape(tokens * heads, size)
        if tokens > 1:
            _put_rows(scratch.query_rows, pl.ds(0, tokens * heads), rows)
        each = shape.of_pass(tokens) * shape.group
        if tokens == 1:
            for i_pass in range(shape.passes(1)):
                scratch.query[i_pass, :each] = rows[i_pass * each : (i_pass + 1) * each].astype(self.params.product)
            return

        def stage(i_pass: Any, _: None) -> None:
            for i_head in range(each):
                of_head = _get_rows(scratch.query_rows, pl.ds(i_pass * each + i_head, tokens, stride=heads))[:, :size]
                scratch.query[i_pass, i_head * tokens : (i_head + 1) * tokens] = of_head.astype(self.params.product)

        jax.lax.fori_loop(0, shape.passes(tokens), stage, None)

    def _deinterleave(self, buffer: Any) -> None:
        """Deinterleave token-major pages, so that the rows of a head can be loaded with a stride."""
        for source, pages, deinterleaved in zip(
            self.params.sources, self.scratch.pages, self.scratch.deinterleaved, strict=True
        ):
            if not source.token_major:
                continue
            chunk = next(count for count in range(_CHUNK, 0, -1) if self.params.shape.keys % count == 0)

            def deinterleave(
                i: Any, _: None, source: Pages = source, pages: Any = pages, deinterleaved: Any = deinterleaved, n: int = chunk
            ) -> None:
                values = pages[buffer, pl.ds(i * n, n)].astype(jnp.float32)
                start = pl.multiple_of(i * n * source.rows, 8) if n * source.rows % 8 == 0 else i * n * source.rows
                _put_rows(deinterleaved, pl.ds(start, n * source.rows), values.reshape(n * source.rows, source.width))

            jax.lax.fori_loop(0, self.params.shape.keys // chunk, deinterleave, None)

    def _read(self, buffer: Any, i_source: int, head: Any, row: tuple[int, int, int], size: int) -> Any:
        """Load one head of a source, float32 `[keys, size]`."""
        source, keys = self.params.sources[i_source], self.params.shape.keys
        factor, first, channel = row
        if source.token_major:
            rows = _get_rows(self.scratch.deinterleaved[i_source], pl.ds(head * factor + first, keys, stride=source.rows))
        else:
            rows = self.scratch.pages[i_source][buffer, :, head]  # [pages, page_size, width]
            rows = rows.astype(jnp.float32).reshape(keys, source.width)
        return rows[:, channel : channel + size]

    # The softmax

    def _clear(self, tokens: int) -> None:
        scratch, shape = self.scratch, self.params.shape
        rows = shape.of_pass(tokens) * shape.group * tokens

        def clear(i_pass: Any, _: None) -> None:
            if self.blocks.sinks is None:
                sinks = jnp.full((rows, LANES), -jnp.inf, jnp.float32)
            else:
                sinks = self._per_row(self.blocks.sinks, i_pass, tokens)  # [rows, 128]
            scratch.row_max[i_pass, :rows] = sinks
            scratch.row_sum[i_pass, :rows] = jnp.where(sinks == -jnp.inf, 0.0, 1.0)
            scratch.acc[i_pass, :rows] = jnp.zeros((rows, self.params.call.value_size), jnp.float32)

        self._over_passes(tokens, clear)

    def _over_passes(self, tokens: int, body: Callable[[Any, None], None]) -> None:
        passes = self.params.shape.passes(tokens)
        if passes == 1:
            body(0, None)
        else:
            jax.lax.fori_loop(0, passes, body, None)

    def _per_row(self, block: Any, i_pass: Any, tokens: int) -> Any:
        """`[K, G, 128]`, a number for each query head, to `[rows of the pass, 128]`."""
        shape, rows = self.params.shape, []
        for i_key_head in range(shape.of_pass(tokens)):
            numbers = block[i_pass * shape.of_pass(tokens) + i_key_head]  # [G, 128]
            if tokens == 1:
                rows.append(numbers)
            else:
                rows += [jnp.broadcast_to(numbers[i : i + 1], (tokens, LANES)) for i in range(shape.group)]
        return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=0)

    def _update_masked(self, work: Work, step: Any, buffer: Any, tokens: int) -> None:
        scratch, size = self.scratch, self.params.page_size
        first, count = work.pages_of(step)
        scratch.page_valid[...] = jnp.ones_like(scratch.page_valid)

        def hide(place: Any, _: None) -> None:
            def zero() -> None:
                lane = jax.lax.broadcasted_iota(jnp.int32, scratch.page_valid.shape, 1)
                missing = (lane >= place * size) & (lane < (place + 1) * size)
                scratch.page_valid[...] = jnp.where(missing, 0.0, scratch.page_valid[...])

            pl.when(jnp.logical_not(work.page(first + place)[1]))(zero)

        missing = self.scalars.requests.complete[work.request] == 0
        pl.when(missing)(lambda: jax.lax.fori_loop(0, count, hide, None))
        if self.blocks.bias is not None:
            self._bias(work, step, tokens)
        self._update(work, step, buffer, tokens, edge=True)

    def _bias(self, work: Work, step: Any, tokens: int) -> None:
        """Gather `qq_bias` for the item's tokens and the step's keys by matmuls with one-hot matrices."""
        width, rows, keys = self.params.call.qq_bias.shape[-1], max(tokens, 8), self.params.shape.keys  # pyright: ignore
        local = work.position - work.first_new + jax.lax.broadcasted_iota(jnp.int32, (rows, width), 0)
        of_token = (local == jax.lax.broadcasted_iota(jnp.int32, (rows, width), 1)).astype(jnp.float32)
        new = work.first_key(step) - work.first_new + jax.lax.broadcasted_iota(jnp.int32, (width, keys), 1)
        of_key = (new == jax.lax.broadcasted_iota(jnp.int32, (width, keys), 0)).astype(jnp.float32)
        for block, moved in zip((self.blocks.bias, self.blocks.code), self.scratch.bias, strict=True):
            moved[:rows] = _exact(_exact(of_token, block[...]), of_key)

    def _update(self, work: Work, step: Any, buffer: Any, tokens: int, *, edge: bool) -> None:
        self._over_passes(tokens, lambda i_pass, _: self._update_pass(work, step, buffer, tokens, i_pass, edge=edge))

    def _update_pass(self, work: Work, step: Any, buffer: Any, tokens: int, i_pass: Any, *, edge: bool) -> None:
        """Online-softmax update with one step's keys, for the heads of one pass."""
        call, scratch, shape = self.params.call, self.scratch, self.params.shape
        of_head, together = shape.group * tokens, shape.of_pass(tokens)
        rows, heads = of_head * together, [i_pass * together + i for i in range(together)]
        products = []
        for i, head in enumerate(heads):
            query = scratch.query[i_pass, i * of_head : (i + 1) * of_head]  # [rows of a head, D]
            key = self._read(buffer, 0, head, self.params.sources[0].key_row, call.query.shape[3])  # [keys, D]
            factor = self.scalars.key_factor[work.member * shape.heads + head]
            products.append(self.params.dot(query, key.astype(self.params.product), 1) * factor)
        logits = products[0] if together == 1 else jnp.concatenate(products, axis=0)  # [rows, keys]
        logits, visible = self._masked(work, step, logits, i_pass, tokens, edge=edge)
        before = scratch.row_max[i_pass, :rows]  # [rows, 128]
        row_max = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
        finite = jnp.where(row_max == -jnp.inf, 0.0, row_max)
        weights = jnp.exp2(logits - finite[:, :1])  # [rows, keys]
        rescale = jnp.exp2(before - finite)
        scratch.row_max[i_pass, :rows] = row_max
        scratch.row_sum[i_pass, :rows] = rescale * scratch.row_sum[i_pass, :rows] + jnp.sum(weights, axis=1, keepdims=True)
        values = []
        for i, head in enumerate(heads):
            own = slice(i * of_head, (i + 1) * of_head)
            values.append(
                self._weighted_values(work, step, buffer, head, weights[own], None if visible is None else visible[own], tokens)
            )
        total = values[0] if together == 1 else jnp.concatenate(values, axis=0)  # [rows, V]
        scratch.acc[i_pass, :rows] = rescale[:, :1] * scratch.acc[i_pass, :rows] + total

    def _masked(self, work: Work, step: Any, logits: Any, i_pass: Any, tokens: int, *, edge: bool) -> tuple[Any, Any]:
        """Logits of one pass with soft cap, slopes and bias, and at an edge their visibility mask."""
        call, rows, keys = self.params.call, *logits.shape
        if call.logits_soft_cap is not None:
            logits = (call.logits_soft_cap * LOG2E) * jnp.tanh(logits)
        if not edge and self.blocks.slopes is None:
            return logits, None
        token = jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0) & (tokens - 1)
        position = work.position + token  # [rows, 1]
        key = work.first_key(step) + jax.lax.broadcasted_iota(jnp.int32, (1, keys), 1)
        if self.blocks.slopes is not None:
            slopes = self._per_row(self.blocks.slopes, i_pass, tokens)[:, :1]
            logits = logits + slopes * (key - position).astype(jnp.float32)
        if not edge:
            return logits, None
        visible = (key < work.length) & (self.scratch.page_valid[...] > 0)
        visible = visible & (key <= position) if call.causal else jnp.broadcast_to(visible, logits.shape)
        if call.window is not None:
            visible &= key > position - call.window
        if self.scratch.bias:
            bias, code = (self._over_heads(ref, rows, tokens) for ref in self.scratch.bias)
            logits = jnp.where(code > MASKED, jnp.nan, logits + bias)
            visible &= code != MASKED
        return jnp.where(visible, logits, -jnp.inf), visible

    def _over_heads(self, ref: Any, rows: int, tokens: int) -> Any:
        """`[tokens, keys]` to `[rows, keys]`."""
        values = ref[:tokens]
        if tokens == 1:
            return jnp.broadcast_to(values, (rows, values.shape[1]))
        return jnp.concatenate([values] * (rows // tokens), axis=0)

    def _weighted_values(self, work: Work, step: Any, buffer: Any, head: Any, weights: Any, visible: Any, tokens: int) -> Any:
        """Weighted values `[rows of a head, V]`. At an edge, non-finite values propagate only to rows that see them."""
        call, params = self.params.call, self.params
        i_source = len(params.sources) - 1
        value = self._read(buffer, i_source, head, params.sources[-1].value_row, call.value_size)  # [keys, V]
        if visible is None:
            return params.dot(weights.astype(params.product), value.astype(params.product), 0)
        if tokens == 1:  # all rows of a token see the same keys
            value = jnp.where(self._visible_keys(work, step), value, 0.0)
            return params.dot(weights.astype(params.product), value.astype(params.product), 0)
        finite = jnp.abs(value) < jnp.inf
        defined = jnp.where(finite, value, 0.0).astype(params.product)
        total = params.dot(weights.astype(params.product), defined, 0)
        if call.key_pages.dtype == "int8":
            return total
        undefined = jnp.where(finite, 0.0, 1.0).astype(jnp.bfloat16)
        touched = jnp.dot(visible.astype(jnp.float32).astype(jnp.bfloat16), undefined, preferred_element_type=jnp.float32)
        return jnp.where(touched > 0, jnp.nan, total)

    def _visible_keys(self, work: Work, step: Any) -> Any:
        """Visibility mask of the item's only token, `[keys, 1]`."""
        page_valid = jnp.transpose(jnp.broadcast_to(self.scratch.page_valid[...], (8, self.params.shape.keys)))[:, :1]
        key = work.first_key(step) + jax.lax.broadcasted_iota(jnp.int32, page_valid.shape, 0)
        return (key >= work.begin) & (key < work.stop) & (page_valid > 0)

    # Results

    def _finish(self, work: Work, tokens: int, more: Any) -> None:
        scratch, shape = self.scratch, self.params.shape
        heads, value_size = scratch.results.shape[1:]
        each = shape.of_pass(tokens) * shape.group

        def wait(work: Work) -> None:
            for there, copy in self._result_copies(work):
                pl.when(there)(copy.wait)

        pl.when(pl.program_id(1) > 0)(lambda: wait(self._work(work.item - self.params.cores)))

        def finish(i_pass: Any, _: None) -> None:
            rows = each * tokens
            total, row_max = scratch.row_sum[i_pass, :rows], scratch.row_max[i_pass, :rows]  # [rows, 128]
            factors = [self.scalars.value_factor[work.member * shape.heads + i_pass * shape.of_pass(tokens) + i]
                       for i in range(shape.of_pass(tokens))]  # fmt: skip
            values = scratch.acc[i_pass, :rows] / jnp.where(total == 0, 1.0, total)[:, :1]
            of_head = shape.group * tokens
            for i, factor in enumerate(factors):
                for i_query in range(shape.group):
                    i_head = i * shape.group + i_query
                    own = values[i * of_head + i_query * tokens : i * of_head + (i_query + 1) * tokens] * factor
                    target = (
                        pl.ds(i_pass * each + i_head, tokens, stride=heads) if tokens > 1 else pl.ds(i_pass * each + i_head, 1)
                    )
                    _put_rows(scratch.result_rows, target, own)
            if self.blocks.lse is not None:
                self._store_lse(row_max, total, i_pass, tokens)

        self._over_passes(tokens, finish)
        rows = _get_rows(scratch.result_rows, pl.ds(0, tokens * heads))[:, :value_size]
        scratch.results[pl.ds(0, tokens)] = rows.reshape(tokens, heads, value_size).astype(scratch.results.dtype)
        for there, copy in self._result_copies(work):
            pl.when(there)(copy.start)
        pl.when(jnp.logical_not(more))(lambda: wait(work))

    def _store_lse(self, row_max: Any, total: Any, i_pass: Any, tokens: int) -> None:
        each = self.params.shape.of_pass(tokens) * self.params.shape.group
        lse = jnp.where(total == 0, -jnp.inf, LN2 * (row_max + jnp.log2(jnp.where(total == 0, 1.0, total))))[:, :1]
        lane = jax.lax.broadcasted_iota(jnp.int32, (tokens, self.blocks.lse.shape[1]), 1)
        block = self.blocks.lse[:tokens]
        for i in range(each):
            block = jnp.where(lane == i_pass * each + i, lse[i * tokens : (i + 1) * tokens], block)
        self.blocks.lse[:tokens] = block
