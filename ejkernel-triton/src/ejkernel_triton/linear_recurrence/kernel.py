"""The launches of `linear_recurrence`.

In forward one kernel loops over the chunks of a segment with the state in registers. If a segment is not a whole sequence, the
states before segments are computed first: each segment starts from zero, and a scan combines them. Backward computes both the
states and their gradients this way, then runs three recurrences; it stores states between segments only. With decays per channel
another kernel computes the scores of all chunks, and queries and keys decayed to the chunk boundaries. In forward outputs that are
not finite are looked for, and what may be wrong before them is made again. A few tokens go one after the other. Gradients of what
heads share are summed by programs that run several of these heads, so that the gradients of each (for Mamba-2 80 in place of one)
are never in memory. If the config says so, backward stores the states of all chunks and their gradients instead, and the gradients
of all chunks are computed at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel.call import vary_like
from ejkernel.operations.linear_recurrence.interface import (
    LinearRecurrenceCall,
    LinearRecurrenceInputs,
    LinearRecurrenceOutputs,
)
from ejkernel.operations.linear_recurrence.transposed import pulled_with_key_first, with_key_first
from ejkernel_triton._blocks import MIN_DOT_SIZE, dot_block
from ejkernel_triton._chunks import chunks_of
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.linear_recurrence import forms
from ejkernel_triton.linear_recurrence.config import Config, can_store_states
from ejkernel_triton.linear_recurrence.every_chunk import (
    chunk_states_kernel,
    key_gradients_kernel,
    log_gradients_kernel,
    query_gradients_kernel,
)
from ejkernel_triton.linear_recurrence.fused_chunk import fused_chunk_kernel, scores_kernel
from ejkernel_triton.linear_recurrence.params import (
    WIDEST_VALUE,
    RecurrenceParams,
    forward_params,
    key_gradient_params,
    prepared_params,
    query_gradient_params,
    takes_scales,
    value_gradient_params,
)
from ejkernel_triton.linear_recurrence.recurrent import recurrent_kernel
from ejkernel_triton.linear_recurrence.states import scan_states_kernel, segment_states_kernel, sums_kernel

_SUMMED_HEADS = 16
_REPAIR_BLOCK = 32
"""Channels of value that a program of `repair` holds."""
_PROGRAMS = 512
"""So many are left where programs run several heads: a large device runs two or more on each of up to 148 multiprocessors."""
_SCAN_BLOCK = 1024
"""State elements of one program of the scan."""
_CHUNK_STATE_ROWS = 64
"""State rows of one program where the states of all chunks are stored."""
_LEAST_CHUNKS = 8
"""Of a segment, whose states are computed once more."""


class _Segments(NamedTuple):
    """A table for packed sequences (`query` as a placeholder without them), their size and number.

    The table pads the call's sequences with two: the tokens before and after them.
    """

    table: tuple[Any, Any, Any]
    size: int
    number: int

    @property
    def used(self) -> Any:
        """Which segments have tokens `[members, segments]`."""
        _, first, sequence = self.table
        return sequence < first.shape[1] - 1

    @property
    def empty(self) -> Any:
        """Which of the call's sequences have no tokens `[members, n]`."""
        _, first, _ = self.table
        return first[:, 1:-2] == first[:, 2:-1]


class _Prepared(NamedTuple):
    """The decay arguments of the kernels; absent ones are replaced by the query.

    read, update: query and key; with decays per channel, scaled and decayed to the boundaries of their chunks. scores `[b, t,
    H, chunk]`, totals `[b, segments, H, chunks, d]`: of chunks, with decays per channel. hi, lo: sums of g. gamma: g_gamma.
    of g. gamma: g_gamma.
    """

    read: Any
    update: Any
    scores: Any
    totals: Any
    hi: Any
    lo: Any
    gamma: Any


class _Problem:
    """What all launches of a call share."""

    def __init__(self, call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs, config: Config) -> None:
        self.call, self.inputs, self.config = call, inputs, config
        self.batch, self.length = call.query.shape[:2]
        self.heads = call.heads[1]
        self.params = forward_params(call)
        self.logs = _channel_logs(call, inputs)
        self.scale, self.skip = (inputs.query if x is None else x for x in (inputs.value_scale, inputs.skip))
        self.whole = call.cu_seqlens is None and bool(config.chunk_size) and self.length % config.chunk_size == 0

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.call.query.shape[3], self.call.value.shape[3]

    @property
    def final_shape(self) -> tuple[int, ...]:
        return self.batch, self.call.sequences, self.heads, *self.state_shape

    def after_sequences(self, cut: _Segments, states: Any, given: Any) -> Any:
        """The states after sequences that have tokens, and after the others, which no program runs, what was given, 0 if None."""
        if not self.params.packed:
            return states
        return jnp.where(cut.empty[..., None, None, None], 0.0 if given is None else given.astype(jnp.float32), states)

    def segments(self, size: int) -> _Segments:
        bounds = self.inputs.cu_seqlens
        if bounds is None:
            return _Segments((self.inputs.query,) * 3, size, -(-self.length // size))
        bounds = jnp.pad(bounds, ((0, 0), (1, 0)))
        bounds = jnp.pad(bounds, ((0, 0), (0, 1)), constant_values=self.length)
        table = chunks_of(bounds, self.length, size)
        return _Segments((table.bounds, table.first, table.sequence), size, table.sequence.shape[1])

    def numbers(self, cut: _Segments) -> tuple[Any, ...]:
        return *cut.table, self.length, cut.number, self.call.sequences

    def _sums(self, cut: _Segments) -> tuple[Any, Any, Any]:
        """Sums of g, and g_gamma; absent ones are replaced by the query."""
        stand_in = self.inputs.query
        gamma = stand_in if self.inputs.g_gamma is None else self.inputs.g_gamma
        if not self.params.g_heads:
            return stand_in, stand_in, gamma
        shape = (self.batch, cut.number, self.heads, cut.size)
        heads = min(_SUMMED_HEADS, dot_block(self.heads))
        hi, lo = call_kernel(
            sums_kernel,
            (self.inputs.g, gamma, *self.numbers(cut)),
            ((shape, jnp.float32), (shape if self.params.hi_lo else (1,), jnp.float32)),
            grid=self.batch * cut.number * (cut.size // self.config.chunk_size) * -(-self.heads // heads),
            num_warps=4,
            R=self.params,
            CHUNK=self.config.chunk_size,
            SEGMENT=cut.size,
            HEADS=heads,
        )
        return hi, lo, gamma

    def tiles(self, params: RecurrenceParams, cut: _Segments, config: Config) -> dict[str, Any]:
        return {
            "R": params,
            "CHUNK": config.chunk_size,
            "SEGMENT": cut.size,
            "BLOCK_K": dot_block(params.width),
            "BLOCK_V": self.block_v(params),
            "FULL_CHUNKS": self.whole,
            "num_warps": self.warps(params),
            "num_stages": config.num_stages,
        }

    def block_v(self, params: RecurrenceParams) -> int:
        return min(self.config.block_v, dot_block(params.channels))

    def transposes_tiles(self, params: RecurrenceParams) -> bool:
        """Whether tiles are transposed, with value channels as rows: for eight warps, there are more of them than tokens of a
        chunk."""
        return params.decay in ("none", "scalar") and self.warps(params) == 8

    def warps(self, params: RecurrenceParams) -> int:
        """Warps, at most as many as the rows of a tile allow."""
        return self.config.num_warps if self.block_v(params) >= 128 else min(self.config.num_warps, 4)

    def blocks(self, params: RecurrenceParams) -> int:
        return -(-params.channels // self.block_v(params))

    def states(
        self,
        params: RecurrenceParams,
        arrays: tuple[Any, Any],
        cut: _Segments,
        initial: Any,
        prepared: _Prepared,
        *,
        final: bool = False,
    ) -> list[Any]:
        """The states before all segments `[b, segments, H, d, v]` and, if `final`, after all sequences `[b, n, H, d, v]`."""
        shape = (self.batch, cut.number, self.heads, *self.state_shape)
        logs = shape[:4] if params.decay == "key" else shape[:3] if params.decay == "scalar" else (1,)
        own, log = call_kernel(
            segment_states_kernel,
            (*arrays, self.scale, *prepared[4:], prepared.totals, *self.numbers(cut)),
            ((shape, jnp.float32), (logs, jnp.float32)),
            grid=self.batch * cut.number * self.heads * self.blocks(params),
            FINAL=final,
            **self.tiles(params, cut, self.config),
        )
        size = params.width * params.channels
        return call_kernel(
            scan_states_kernel,
            (own, log, own if initial is None else initial, cut.table[1], cut.number, self.call.sequences),
            ((shape, jnp.float32), (self.final_shape if final else (1,), jnp.float32)),
            grid=self.batch * self.call.sequences * self.heads * -(-size // _SCAN_BLOCK),
            num_warps=4,
            R=params,
            BLOCK=_SCAN_BLOCK,
            INITIAL=initial is not None,
            FINAL=final,
        )

    def prepare(self, cut: _Segments) -> _Prepared:
        """The decay arguments of the kernels; with decays per channel also the scores of all chunks, and decayed queries and
        keys."""
        query, key = self.inputs.query, self.inputs.key
        if self.params.decay != "key":
            return _Prepared(query, key, query, query, *self._sums(cut))
        constants: dict[str, Any] = self.tiles(self.params, cut, self.config)
        del constants["BLOCK_V"]
        constants["BLOCK_K"] = min(constants["BLOCK_K"], 16 if self.config.chunk_size == 16 else 64)
        constants |= {"num_warps": 4, "num_stages": 1}
        chunks = cut.size // self.config.chunk_size
        width = self.call.query.shape[3]
        tokens = (self.batch, self.length, self.heads)
        wide = query.dtype != jnp.bfloat16
        scores, read, update, totals = call_kernel(
            scores_kernel,
            (query, key, self.logs, *self.numbers(cut)),
            (
                ((*tokens, self.config.chunk_size), jnp.float32 if wide else query.dtype),
                ((*tokens, width), query.dtype),
                ((*tokens, width), query.dtype),
                ((self.batch, cut.number, self.heads, chunks, width), jnp.float32),
            ),
            grid=self.batch * cut.number * chunks * self.heads,
            LEVELS=self.levels,
            **constants,
        )
        return _Prepared(read, update, scores, totals, query, query, query)

    @property
    def levels(self) -> int:
        return self.config.chunk_size.bit_length() - 1

    def read(
        self,
        params: RecurrenceParams,
        arrays: tuple[Any, Any, Any],
        cut: _Segments,
        prepared: _Prepared,
        *,
        update: Any = None,
        before: Any = None,
        dtype: Any,
        last: bool = False,
        logs: _Logs | None = None,
        members: int = 1,
    ) -> list[Any]:
        """The outputs `[b, t, H, channels]` of a recurrence, if `last` the states after sequences with tokens `[b, n, H, d, v]`,
        what `logs` requests, and, of the first gradient, the states before all chunks `[b, chunks, H, d, v]`.

        members: neighbouring heads whose outputs are summed, `[b, t, H / members, channels]`.
        """
        query = arrays[0]
        given = tuple(query if x is None else x for x in logs or _Logs(None))
        log = 0 if logs is None else 1 if logs.partner is None else 2
        shape = (self.batch, self.length, self.heads, params.channels)
        log_shape = (1,) if logs is None else (self.blocks(params), *shape[:3]) if params.decay == "scalar" else shape
        parts = self.heads // members
        kept = (self.batch, cut.number * (cut.size // self.config.chunk_size), self.heads, *self.state_shape)
        return call_kernel(
            fused_chunk_kernel,
            (
                *(*arrays, self.scale, self.skip, *prepared[4:], self.logs, prepared.scores, prepared.totals),
                *(query if x is None else x for x in (update, before)),
                *(*given, *self.numbers(cut)),
            ),
            (
                ((*shape[:2], parts, params.channels), dtype),
                (self.final_shape if last else (1,), jnp.float32),
                (log_shape, jnp.float32),
                (kept if log == 1 else (1,), self.kept_dtype),
            ),
            grid=self.batch * cut.number * parts * self.blocks(params),
            LEVELS=self.levels,
            BEFORE=before is not None,
            LAST=last,
            TRANSPOSED=self.transposes_tiles(params),
            LOG=log,
            MEMBERS=members,
            **self.tiles(params, cut, self.config),
        )

    @property
    def kept_dtype(self) -> Any:
        """Of the states that gradients of decays take: products of states and their gradients, rounded once, are sums of many."""
        return jnp.float32 if self.call.query.dtype == "float32" else jnp.bfloat16

    def members(self, params: RecurrenceParams, cut: _Segments) -> int:
        """Heads of a group that one program sums: as many as leave the device enough programs."""
        return _members(self.heads // params.own_heads, self.batch * cut.number * self.heads * self.blocks(params))

    def chunk_states(
        self,
        params: RecurrenceParams,
        arrays: tuple[Any, Any],
        cut: _Segments,
        prepared: _Prepared,
        *,
        initial: Any,
        segments: _Segments,
        whole: bool,
        others: Any = None,
    ) -> list[Any]:
        """The states before all chunks `[b, chunks, H, d, v]` in the dtype of value and after sequences `[b, n, H, d, v]` that have
        tokens; with `others`, the forward phase's, also what pairs of tokens around each chunk give to gradients of decays.

        segments: one for each program. initial: the states before them, or, if they are `whole` sequences, before sequences."""
        key, value = arrays
        block_k, programs = self.chunk_state_programs(params)
        around = (self.batch, cut.number, self.heads, programs)
        tiles: dict[str, Any] = self.chunk_tiles(params) | {"BLOCK_K": block_k, "num_warps": 4}
        return call_kernel(
            chunk_states_kernel,
            (
                *(key, value, self.scale, *prepared[4:], value if initial is None else initial),
                value if others is None else others,
                *(cut.table[1], cut.number, *self.numbers(segments)),
            ),
            (
                ((self.batch, cut.number, self.heads, *self.state_shape), value.dtype),
                (self.final_shape, jnp.float32),
                ((1,) if others is None else around, jnp.float32),
            ),
            grid=self.batch * self.heads * programs * segments.number,
            SEGMENT=segments.size,
            INITIAL=initial is not None,
            WHOLE=whole,
            AROUND=others is not None,
            **tiles,
        )

    def chunk_state_programs(self, params: RecurrenceParams) -> tuple[int, int]:
        """State rows of one program where the states of all chunks are stored, and programs of one state."""
        rows = params.width
        block_k = _CHUNK_STATE_ROWS if rows % _CHUNK_STATE_ROWS == 0 else dot_block(rows)
        return block_k, self.blocks(params) * -(-rows // block_k)

    def chunks_at_once(self) -> int:
        """Chunks of a segment where heads are too few to fill a large device, 0 where they are enough."""
        programs = self.batch * self.heads * self.chunk_state_programs(self.params)[1]
        chunks = -(-self.length // self.config.chunk_size)
        segment = -(-chunks // -(-_PROGRAMS // programs))
        return max(segment, _LEAST_CHUNKS) if programs < _PROGRAMS // 2 and chunks > _LEAST_CHUNKS else 0

    def chunk_tiles(self, params: RecurrenceParams) -> dict[str, Any]:
        config = self.config
        return {
            "R": params,
            "CHUNK": config.chunk_size,
            "BLOCK_K": dot_block(params.width),
            "BLOCK_V": self.block_v(params),
            "FULL_CHUNKS": self.whole,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }

    def chunk_sums(self, cut: _Segments) -> tuple[int, tuple[Any, Any], dict[str, Any]]:
        """Of the gradients of all chunks: parts in which those of query and key are summed, what their logs are, tiles."""
        blocks, programs = self.blocks(self.params), self.batch * cut.number * self.heads
        members = _members(self.heads // self.params.key_heads * blocks, programs * blocks)
        logs = ((blocks, self.batch, cut.number, self.heads, cut.size), jnp.float32)
        tiles = self.chunk_tiles(self.params) | {"grid": programs * blocks // members, "MEMBERS": members}
        return self.heads * blocks // members, logs, tiles

    def gradients_from_states(self, d_out: Any, before: Any, cut: _Segments, prepared: _Prepared) -> list[Any]:
        """What the states before all chunks give to the gradient of query `[b, t, parts, d]`, float32, and their logs."""
        parts, logs, tiles = self.chunk_sums(cut)
        return call_kernel(
            query_gradients_kernel,
            (self.inputs.query, d_out, *prepared[4:], before, *self.numbers(cut)),
            (((self.batch, self.length, parts, self.params.width), jnp.float32), logs),
            **tiles,
        )

    def chunk_gradients(
        self, d_out: Any, from_states: list[Any], d_states: list[Any], cut: _Segments, prepared: _Prepared
    ) -> tuple[list[Any], Any]:
        """The gradients of query, key `[b, t, parts, d]`, value, value_scale `[blocks, b, t, H]` and skip `[blocks, b, chunks, H]`;
        and of log decays `[1, b, t, H]`."""
        inputs, params = self.inputs, self.params
        tokens = self.batch, self.length
        parts, logs, tiles = self.chunk_sums(cut)
        sums, channels = (*tokens, parts, params.width), (*tokens, self.heads, params.channels)

        def dtype(given: Any, heads: int) -> Any:
            return given.dtype if given.shape[2] == heads else jnp.float32

        scales = (self.blocks(params), *tokens, self.heads) if params.value_scale_heads else (1,)
        skips = (self.blocks(params), self.batch, cut.number, self.heads) if params.skip_heads else (1,)
        *gradients, rest, d_scale, d_skip = call_kernel(
            key_gradients_kernel,
            (
                *(inputs.query, inputs.key, inputs.value, self.scale, self.skip, d_out),
                *(*prepared[4:], d_states[0], from_states[0], *self.numbers(cut)),
            ),
            (
                (sums, dtype(inputs.query, parts)),
                (sums, dtype(inputs.key, parts)),
                (channels, dtype(inputs.value, self.heads)),
                ((2, *logs[0]), jnp.float32),
                (scales, jnp.float32),
                (skips, jnp.float32),
            ),
            **tiles,
        )
        if params.skip_heads and params.packed:
            d_skip = jnp.where(cut.used[None, ..., None], d_skip, 0.0)
        heads = min(_SUMMED_HEADS, dot_block(self.heads))
        d_logs = call_kernel(
            log_gradients_kernel,
            (from_states[1], rest, d_states[2], *self.numbers(cut)),
            (((1, *tokens, self.heads), jnp.float32),),
            grid=self.batch * cut.number * -(-self.heads // heads),
            num_warps=4,
            R=params,
            CHUNK=cut.size,
            HEADS=heads,
            BLOCKS=self.blocks(params),
            PROGRAMS=d_states[2].shape[3],
        )[0]
        return [*gradients, d_scale, d_skip], d_logs

    def step_by_step(self, cut: _Segments, before: Any, block: int, warps: int, *, found: Any = None) -> list[Any]:
        """Outputs, and states after segments that are wanted, token after token. Of outputs that were found, those before the first
        value that is not finite may be wrong, and are made again."""
        call, inputs = self.call, self.inputs
        params = dataclasses.replace(self.params, transposed=call.transposed_state)
        block, repair = min(block, dot_block(params.channels)), found is not None
        final = call.return_state and not repair
        given = (
            *(inputs.query, inputs.key, inputs.value, self.scale, self.skip),
            *(inputs.query if x is None else x for x in (inputs.g, inputs.g_gamma)),
            self.logs,
            *(inputs.query if x is None else x for x in (inputs.bonus, before, found)),
        )
        shape = (self.batch, self.length, self.heads, params.channels)
        states = (self.batch, cut.number, self.heads, *call.state_shape)
        return call_kernel(
            recurrent_kernel,
            (*given, *self.numbers(cut)),
            ((shape, call.value.dtype), (states if final else (1,), jnp.float32)),
            grid=self.batch * cut.number * self.heads * -(-params.channels // block),
            num_warps=warps,
            input_output_aliases={len(given) - 1: 0} if repair else None,
            R=params,
            SEGMENT=cut.size,
            BLOCK_K=dot_block(params.width),
            BLOCK_V=block,
            BEFORE=before is not None,
            FINAL=final,
            BONUS_HEADS=0 if call.bonus is None else call.bonus.shape[1],
            BONUS_BATCH=call.bonus is not None and call.bonus.shape[0] > 1,
            REPAIR=repair,
        )


def _members(group: int, programs: int) -> int:
    """As many of a group as one program can run one after the other and leave the device enough of `programs`."""
    return max(count for count in range(1, group + 1) if group % count == 0 and (count == 1 or programs // count >= _PROGRAMS))


class _Logs(NamedTuple):
    """For the gradients of decays. own: the array whose gradient is computed; partner, states: own . out of the first gradient, and
    the states before all chunks."""

    own: Any
    partner: Any = None
    states: Any = None


def _channel_logs(call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs) -> Any:
    """Decays per channel `[b, t, h, d]`, including those per head; the query as a placeholder if there are none."""
    if inputs.gk is None:
        return inputs.query
    if inputs.g is None and inputs.g_gamma is None:
        return inputs.gk
    heads = call.heads[1]
    logs = _every_head(inputs.gk.astype(jnp.float32), 2, heads)
    if inputs.g is not None:
        logs += _every_head(inputs.g.astype(jnp.float32), 2, heads)[..., None]
    if inputs.g_gamma is not None:
        logs += _every_head(inputs.g_gamma.astype(jnp.float32), 1, heads)[:, None, :, None]
    return logs


def _every_head(array: Any, axis: int, heads: int) -> Any:
    return array if array.shape[axis] == heads else jnp.repeat(array, heads // array.shape[axis], axis=axis)


def _zero_size(call: LinearRecurrenceCall) -> bool:
    batch, length = call.query.shape[:2]
    return not (batch and length and call.sequences)


def forward(call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs, config: Config) -> LinearRecurrenceOutputs:
    if _zero_size(call):
        return _zero_outputs(call, inputs)
    if forms.has_scales(call) and not takes_scales(call):
        return forms.forward_around_scales(forward, call, inputs, config)
    if not config.chunk_size:
        problem = _Problem(call, inputs, config)
        cut = problem.segments(-(-problem.length // MIN_DOT_SIZE) * MIN_DOT_SIZE)
        out, final = problem.step_by_step(cut, inputs.initial_state, config.block_v, config.num_warps)
        return LinearRecurrenceOutputs(out, final if call.return_state else None)
    if call.transposed_state:
        return with_key_first(call, inputs, lambda call, inputs: forward(call, inputs, config))
    if call.bonus is not None:
        return forms.forward_with_bonus(forward, call, inputs, config)
    if call.value.shape[3] > WIDEST_VALUE:
        return forms.forward_in_parts(forward, call, inputs, config)
    problem = _Problem(call, inputs, config)
    length = problem.length
    params = prepared_params(problem.params)
    fused = call.cu_seqlens is None and (not config.segment_size or config.segment_size >= length)
    cut = problem.segments(
        -(-length // config.chunk_size) * config.chunk_size if fused else config.segment_size or _segment_of(config)
    )
    prepared = problem.prepare(cut)
    arrays, before, final = (prepared.read, prepared.update, inputs.value), inputs.initial_state, None
    # Packed sequences leave their states with the outputs: their last segments, often the only ones, are read once. A row's is
    # found before outputs, which whoever wants the state alone then need not compute.
    last = call.return_state and (fused or params.packed)
    if not fused:
        before, final = problem.states(params, arrays[1:], cut, before, prepared, final=call.return_state and not last)
    found = problem.read(params, arrays, cut, prepared, before=before, dtype=call.value.dtype, last=last)
    out = found[0]
    if last:
        final = problem.after_sequences(cut, found[1], inputs.initial_state)
    if length > 1:
        out, _ = problem.step_by_step(cut, before, _REPAIR_BLOCK, 4, found=out)
    return LinearRecurrenceOutputs(out, final if call.return_state else None)


def _segment_of(config: Config) -> int:
    """Segment size of packed sequences, which are always segmented."""
    return 8 * config.chunk_size


def _zero_outputs(call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs) -> LinearRecurrenceOutputs:
    """Outputs if no token is in a sequence."""
    (batch, length), heads, channels = call.query.shape[:2], call.heads[1], call.value.shape[3]
    out = vary_like(jnp.zeros((batch, length, heads, channels), call.value.dtype), inputs)
    if not call.return_state:
        return LinearRecurrenceOutputs(out)
    given = inputs.initial_state
    if given is not None:
        return LinearRecurrenceOutputs(out, given.astype(jnp.float32))
    return LinearRecurrenceOutputs(
        out, vary_like(jnp.zeros((batch, call.sequences, heads, *call.state_shape), jnp.float32), inputs)
    )


def backward(
    call: LinearRecurrenceCall,
    inputs: LinearRecurrenceInputs,
    outputs: LinearRecurrenceOutputs,
    cotangents: LinearRecurrenceOutputs,
    config: Config,
) -> LinearRecurrenceInputs:
    d_final = cotangents.final_state
    if _zero_size(call):
        return _zero_gradients(inputs, d_final)
    if call.transposed_state:
        return pulled_with_key_first(
            call, inputs, cotangents, lambda call, inputs, cotangents: backward(call, inputs, outputs, cotangents, config)
        )
    stored = config.store_states and can_store_states(call)
    if forms.has_scales(call) and not (stored and takes_scales(call)):
        return forms.backward_around_scales(backward, call, inputs, outputs, cotangents, config)
    if call.bonus is not None:
        return forms.backward_with_bonus(backward, call, inputs, outputs, cotangents, config)
    if call.value.shape[3] > WIDEST_VALUE:
        return forms.backward_in_parts(backward, call, inputs, outputs, cotangents, config)
    problem = _Problem(call, inputs, config)
    d_out = cotangents.out
    if stored:
        return _gradients_of_chunks(problem, d_out, d_final)
    cut = problem.segments(
        min(config.segment_size or _segment_of(config), -(-problem.length // config.chunk_size) * config.chunk_size)
    )
    prepared = problem.prepare(cut)
    params = problem.params
    query, key, value = inputs.query, inputs.key, inputs.value
    decaying = params.decay != "none"
    before, _ = problem.states(prepared_params(params), (prepared.update, value), cut, inputs.initial_state, prepared)
    to_value = value_gradient_params(prepared_params(params))
    d_after, d_initial = problem.states(
        to_value, (prepared.read, d_out), cut, d_final, prepared, final=inputs.initial_state is not None
    )

    def gradient(given: Any, params: RecurrenceParams, arrays: tuple[Any, Any, Any], **options: Any) -> list[Any]:
        """With heads that share, float32 sums of as many as one program runs."""
        dtype = given.dtype if given.shape[2] == problem.heads else jnp.float32
        return problem.read(params, arrays, cut, prepared, dtype=dtype, members=problem.members(params, cut), **options)

    d_query, _, products, states = gradient(
        query, query_gradient_params(params), (d_out, value, key), update=prepared.update, before=before,
        logs=_Logs(query) if decaying else None,
    )  # fmt: skip
    d_key, _, d_logs, _ = gradient(
        key, key_gradient_params(params), (value, d_out, query), update=prepared.read, before=d_after,
        logs=_Logs(key, products, states) if decaying else None,
    )  # fmt: skip
    d_value = gradient(value, to_value, (prepared.update, prepared.read, d_out), before=d_after)[0]
    return _gradients(problem, (d_query, d_key, d_value), d_logs, d_initial)


def _gradients_of_chunks(problem: _Problem, d_out: Any, d_final: Any) -> LinearRecurrenceInputs:
    """The gradients from the stored states of all chunks, and from those of their gradients."""
    inputs, chunk = problem.inputs, problem.config.chunk_size
    cut = problem.segments(chunk)
    prepared = problem.prepare(cut)
    params, to_value = problem.params, value_gradient_params(problem.params)
    keys, queries = (inputs.key, inputs.value), (inputs.query, d_out)
    first, d_last, segment = inputs.initial_state, d_final, problem.chunks_at_once()
    segments = problem.segments((segment or -(-problem.length // chunk)) * chunk)
    if segment:
        of_segments = problem.prepare(segments)
        first = problem.states(params, keys, segments, first, of_segments)[0]
        d_last = problem.states(to_value, queries, segments, d_last, of_segments)[0]
    options: dict[str, Any] = {"segments": segments, "whole": not segment}
    before = problem.chunk_states(params, keys, cut, prepared, initial=first, **options)[0]
    from_states = problem.gradients_from_states(d_out, before, cut, prepared)
    d_states = problem.chunk_states(to_value, queries, cut, prepared, initial=d_last, others=before, **options)
    gradients, d_logs = problem.chunk_gradients(d_out, from_states, d_states, cut, prepared)
    return _gradients(problem, gradients, d_logs, problem.after_sequences(cut, d_states[1], d_final))


def _gradients(problem: _Problem, gradients: Iterable[Any], d_logs: Any, d_initial: Any) -> LinearRecurrenceInputs:
    """Those of the inputs, from those of query, key, value and perhaps factors, of log decays, and of the first states."""
    inputs = problem.inputs
    d_query, d_key, d_value, *d_scales = gradients
    return LinearRecurrenceInputs(
        query=_shared(d_query, inputs.query, 2),
        key=_shared(d_key, inputs.key, 2),
        value=_shared(d_value, inputs.value, 2),
        **_decay_gradients(problem, d_logs),
        **_scale_gradients(inputs, *d_scales),
        initial_state=None if inputs.initial_state is None else d_initial.astype(inputs.initial_state.dtype),
    )


def _decay_gradients(problem: _Problem, d_logs: Any) -> dict[str, Any]:
    """The gradients of g, gk and g_gamma from that of a token's total log decay, `[b, t, H, d]` or `[blocks, b, t, H]`."""
    inputs, found = problem.inputs, {}
    if problem.params.decay == "none":
        return found
    if inputs.gk is not None:
        found["gk"] = _shared(d_logs, inputs.gk, 2)
        per_head = jnp.sum(d_logs, axis=3)
    else:
        per_head = jnp.sum(d_logs, axis=0)
    if inputs.g is not None:
        found["g"] = _shared(per_head, inputs.g, 2)
    if inputs.g_gamma is not None:
        found["g_gamma"] = _shared(_of_rows(jnp.sum(per_head, axis=1), inputs.g_gamma), inputs.g_gamma, 1)
    return found


def _scale_gradients(inputs: LinearRecurrenceInputs, d_scale: Any = None, d_skip: Any = None) -> dict[str, Any]:
    """The gradients of value_scale and skip from those of blocks `[blocks, b, t, H]` and of chunks, `[blocks, b, chunks, H]`."""
    found = {}
    if inputs.value_scale is not None:
        found["value_scale"] = _shared(jnp.sum(d_scale, axis=0), inputs.value_scale, 2)
    if inputs.skip is not None:
        total = jnp.sum(d_skip, axis=(0, 2))[..., None]
        found["skip"] = _shared(_of_rows(total, inputs.skip), inputs.skip, 1)
    return found


def _of_rows(gradient: Any, like: Any) -> Any:
    """The gradient of every batch member, summed if they share one row."""
    return jnp.sum(gradient, axis=0, keepdims=True) if like.shape[0] == 1 else gradient


def _shared(gradient: Any, like: Any, axis: int) -> Any:
    """The gradient of all H heads, summed over the heads that share one."""
    kept = like.shape[axis]
    if gradient.shape[axis] != kept:
        shape = gradient.shape
        grouped = gradient.reshape(*shape[:axis], kept, shape[axis] // kept, *shape[axis + 1 :])
        gradient = jnp.sum(grouped.astype(jnp.float32), axis=axis + 1)
    return gradient.astype(like.dtype)


def _zero_gradients(inputs: LinearRecurrenceInputs, d_final: Any) -> LinearRecurrenceInputs:
    """Gradients if no token is in a sequence."""
    zeros = {
        name: None if x is None or name == "cu_seqlens" else vary_like(jnp.zeros(x.shape, x.dtype), inputs)
        for name, x in inputs._asdict().items()
    }
    if inputs.initial_state is not None and d_final is not None:
        zeros["initial_state"] = d_final.astype(inputs.initial_state.dtype)
    return LinearRecurrenceInputs(**zeros)
