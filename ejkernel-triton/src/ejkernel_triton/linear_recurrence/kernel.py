"""The launches of `linear_recurrence`.

Forward: one kernel walks over the tokens of a segment with the state in registers. Where a segment is not a whole sequence, the
states before segments are found first: every segment makes one out of none, and a scan adds them up. Backward makes both the states
and their gradients so, then walks three times; it keeps states between segments only. With decays per channel a kernel of its own
makes the scores of all chunks, and their queries and keys under the decays up to the chunk's edges.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel.call import vary_like
from ejkernel.operations.linear_recurrence.interface import (
    LinearRecurrenceCall,
    LinearRecurrenceInputs,
    LinearRecurrenceOutputs,
)
from ejkernel_triton._blocks import product_block
from ejkernel_triton._chunks import chunks_of
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.linear_recurrence.config import Config
from ejkernel_triton.linear_recurrence.rules import (
    Walk,
    key_gradient_of,
    prepared,
    query_gradient_of,
    value_gradient_of,
    walk_of,
)
from ejkernel_triton.linear_recurrence.states import scan_states_kernel, segment_states_kernel, sums_kernel
from ejkernel_triton.linear_recurrence.walk import scores_kernel, walk_kernel

_SUMMED_HEADS = 16
_SCANNED = 1024
"""Elements of a state that one program of the scan holds."""


class _Segments(NamedTuple):
    """How tokens are cut: a table for packed sequences (absent: `query` stands in), and numbers."""

    table: tuple[Any, Any, Any]
    size: int
    number: int


class _Prepared(NamedTuple):
    """What kernels are given of the decays; what is absent is replaced by an array that is there.

    read, update: query and key, under decays per channel with the scale and the decays that lie between them and the edges of their
    chunks. scores `[b, t, H, chunk]`, totals `[b, segments, H, chunks, d]`: of chunks, under decays per channel. coarse, fine: sums
    of g. gamma: g_gamma.
    """

    read: Any
    update: Any
    scores: Any
    totals: Any
    coarse: Any
    fine: Any
    gamma: Any


class _Problem:
    """What every launch of a call has in common."""

    def __init__(self, call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs, config: Config) -> None:
        self.call, self.inputs, self.config = call, inputs, config
        self.batch, self.length = call.query.shape[:2]
        self.heads = call.heads[1]
        self.walk = walk_of(call)
        self.logs = _channel_logs(call, inputs)
        self.whole = call.cu_seqlens is None and self.length % config.chunk == 0

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.call.query.shape[3], self.call.value.shape[3]

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
        """Sums of g, if there is one, and g_gamma; absent ones are replaced by an array that is there."""
        stand_in = self.inputs.query
        gamma = stand_in if self.inputs.g_gamma is None else self.inputs.g_gamma
        if not self.walk.g_heads:
            return stand_in, stand_in, gamma
        shape = (self.batch, cut.number, self.heads, cut.size)
        heads = min(_SUMMED_HEADS, product_block(self.heads))
        coarse, fine = call_kernel(
            sums_kernel,
            (self.inputs.g, gamma, *self.numbers(cut)),
            ((shape, jnp.float32), (shape if self.walk.fine else (1,), jnp.float32)),
            grid=self.batch * cut.number * (cut.size // self.config.chunk) * -(-self.heads // heads),
            num_warps=4,
            R=self.walk,
            CHUNK=self.config.chunk,
            SEGMENT=cut.size,
            HEADS=heads,
        )
        return coarse, fine, gamma

    def tiles(self, walk: Walk, cut: _Segments, config: Config) -> dict[str, Any]:
        return {
            "R": walk,
            "CHUNK": config.chunk,
            "SEGMENT": cut.size,
            "BLOCK_K": product_block(walk.width),
            "BLOCK_V": self.block(walk),
            "WHOLE": self.whole,
            "num_warps": self.warps(walk),
            "num_stages": config.num_stages,
        }

    def block(self, walk: Walk) -> int:
        return min(self.config.block, product_block(walk.channels))

    def turned(self, walk: Walk) -> bool:
        """Whether the rows of a walk's tiles are channels of value: more of them than tokens of a chunk, for eight warps."""
        return walk.decay in ("none", "scalar") and self.warps(walk) == 8

    def warps(self, walk: Walk) -> int:
        """No more than can share the rows of a tile."""
        return self.config.num_warps if self.block(walk) >= 128 else min(self.config.num_warps, 4)

    def blocks(self, walk: Walk) -> int:
        return -(-walk.channels // self.block(walk))

    def states(self, walk: Walk, key: Any, value: Any, cut: _Segments, initial: Any, made: _Prepared) -> list[Any]:
        """The states before all segments `[b, segments, H, d, v]` and after all sequences `[b, n, H, d, v]`."""
        shape = (self.batch, cut.number, self.heads, *self.state_shape)
        logs = shape[:4] if walk.decay == "key" else shape[:3] if walk.decay == "scalar" else (1,)
        own, log = call_kernel(
            segment_states_kernel,
            (key, value, *made[4:], made.totals, *self.numbers(cut)),
            ((shape, jnp.float32), (logs, jnp.float32)),
            grid=self.batch * cut.number * self.heads * self.blocks(walk),
            **self.tiles(walk, cut, self.config),
        )
        size = walk.width * walk.channels
        return call_kernel(
            scan_states_kernel,
            (own, log, own if initial is None else initial, cut.table[1], cut.number, self.call.sequences),
            ((shape, jnp.float32), ((self.batch, self.call.sequences, self.heads, *self.state_shape), jnp.float32)),
            grid=self.batch * self.call.sequences * self.heads * -(-size // _SCANNED),
            num_warps=4,
            R=walk,
            BLOCK=_SCANNED,
            INITIAL=initial is not None,
        )

    def prepare(self, cut: _Segments) -> _Prepared:
        """What kernels are given of the decays. Under decays per channel the scores of all chunks, and queries and keys."""
        query, key = self.inputs.query, self.inputs.key
        if self.walk.decay != "key":
            return _Prepared(query, key, query, query, *self._sums(cut))
        constants: dict[str, Any] = self.tiles(self.walk, cut, self.config)
        del constants["BLOCK_V"]
        constants["BLOCK_K"] = min(constants["BLOCK_K"], 16 if self.config.chunk == 16 else 64)
        constants |= {"num_warps": 4, "num_stages": 1}
        chunks = cut.size // self.config.chunk
        width = self.call.query.shape[3]
        tokens = (self.batch, self.length, self.heads)
        wide = query.dtype != jnp.bfloat16
        scores, read, update, totals = call_kernel(
            scores_kernel,
            (query, key, self.logs, *self.numbers(cut)),
            (
                ((*tokens, self.config.chunk), jnp.float32 if wide else query.dtype),
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
        return self.config.chunk.bit_length() - 1

    def read(
        self,
        walk: Walk,
        arrays: tuple[Any, Any, Any],
        cut: _Segments,
        made: _Prepared,
        *,
        update: Any = None,
        before: Any = None,
        dtype: Any,
        last: bool = False,
        logs: _Logs | None = None,
    ) -> list[Any]:
        """The outputs `[b, t, H, channels]` of a walk, the states after segments if `last`, and what `logs` asks for."""
        query = arrays[0]
        stand_in = (query, query, query, query)
        given = stand_in if logs is None else tuple(query if x is None else x for x in logs.arrays)
        state = (self.batch, cut.number, self.heads, *self.state_shape)
        shape = (self.batch, self.length, self.heads, walk.channels)
        log_shape = (1,) if logs is None else (self.blocks(walk), *shape[:3]) if walk.decay == "scalar" else shape
        return call_kernel(
            walk_kernel,
            (
                *(*arrays, *made[4:], self.logs, made.scores, made.totals, query if update is None else update),
                query if before is None else before,
                *(*given, *self.numbers(cut)),
            ),
            ((shape, dtype), (state if last else (1,), jnp.float32), (log_shape, jnp.float32)),
            grid=self.batch * cut.number * self.heads * self.blocks(walk),
            LEVELS=self.levels,
            BEFORE=before is not None,
            LAST=last,
            TURNED=self.turned(walk),
            LOG=0 if logs is None else 1 if logs.partner is None else 2,
            FINAL=logs is not None and logs.final is not None,
            **self.tiles(walk, cut, self.config),
        )


class _Logs(NamedTuple):
    """For the gradients of decays. own: the array whose gradient is made; partner: own . out of the first gradient; after, final:
    the states before segments and after sequences, final only if it has a gradient."""

    own: Any
    partner: Any = None
    after: Any = None
    final: Any = None

    @property
    def arrays(self) -> tuple[Any, ...]:
        return tuple(self)


def _channel_logs(call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs) -> Any:
    """Decays per channel `[b, t, h, d]` with those per head in them; query where there are none."""
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
    problem = _Problem(call, inputs, config)
    batch, length, heads = problem.batch, problem.length, problem.heads
    if _zero_size(call):
        out = vary_like(jnp.zeros((batch, length, heads, call.value.shape[3]), call.value.dtype), inputs)
        return LinearRecurrenceOutputs(out, _initial(problem) if call.return_state else None)
    walk = prepared(problem.walk)
    fused = call.cu_seqlens is None and (not config.segment or config.segment >= length)
    cut = problem.segments(-(-length // config.chunk) * config.chunk if fused else config.segment or _segment_of(config))
    made = problem.prepare(cut)
    if fused:
        before, final = inputs.initial_state, None
    else:
        before, final = problem.states(walk, made.update, inputs.value, cut, inputs.initial_state, made)
    last = fused and call.return_state
    arrays = made.read, made.update, inputs.value
    found = problem.read(walk, arrays, cut, made, before=before, dtype=call.value.dtype, last=last)
    return LinearRecurrenceOutputs(found[0], (found[1] if fused else final) if call.return_state else None)


def _segment_of(config: Config) -> int:
    """For packed sequences, which are always cut."""
    return 8 * config.chunk


def _initial(problem: _Problem) -> Any:
    given = problem.inputs.initial_state
    if given is not None:
        return given.astype(jnp.float32)
    shape = (problem.batch, problem.call.sequences, problem.heads, *problem.state_shape)
    return vary_like(jnp.zeros(shape, jnp.float32), problem.inputs)


def backward(
    call: LinearRecurrenceCall,
    inputs: LinearRecurrenceInputs,
    outputs: LinearRecurrenceOutputs,
    cotangents: LinearRecurrenceOutputs,
    config: Config,
) -> LinearRecurrenceInputs:
    problem = _Problem(call, inputs, config)
    d_final = cotangents.final_state
    if _zero_size(call):
        return _nothing(problem, d_final)
    d_out = cotangents.out
    cut = problem.segments(min(config.segment or _segment_of(config), -(-problem.length // config.chunk) * config.chunk))
    made = problem.prepare(cut)
    walk = problem.walk
    query, key, value = inputs.query, inputs.key, inputs.value
    before, final = problem.states(prepared(walk), made.update, value, cut, inputs.initial_state, made)
    to_value = value_gradient_of(prepared(walk))
    d_after, d_initial = problem.states(to_value, made.read, d_out, cut, d_final, made)

    decaying = walk.decay != "none"

    def dtype(given: Any) -> Any:
        return given.dtype if given.shape[2] == problem.heads else jnp.float32

    d_query, _, products = problem.read(
        query_gradient_of(walk), (d_out, value, key), cut, made, update=made.update, before=before, dtype=dtype(query),
        logs=_Logs(query) if decaying else None,
    )  # fmt: skip
    logs = _Logs(key, products, before, final if d_final is not None else None)
    d_key, _, d_logs = problem.read(
        key_gradient_of(walk), (value, d_out, query), cut, made, update=made.read, before=d_after, dtype=dtype(key),
        logs=logs if decaying else None,
    )  # fmt: skip
    d_value = problem.read(to_value, (made.update, made.read, d_out), cut, made, before=d_after, dtype=dtype(value))[0]
    return LinearRecurrenceInputs(
        query=_shared(d_query, query, 2),
        key=_shared(d_key, key, 2),
        value=_shared(d_value, value, 2),
        **_decay_gradients(problem, d_logs),
        initial_state=None if inputs.initial_state is None else d_initial.astype(inputs.initial_state.dtype),
    )


def _decay_gradients(problem: _Problem, d_logs: Any) -> dict[str, Any]:
    """From the gradients of the sums of all log decays of a token, per channel `[b, t, H, d]` or `[blocks, b, t, H]`."""
    inputs, found = problem.inputs, {}
    if problem.walk.decay == "none":
        return found
    if inputs.gk is not None:
        found["gk"] = _shared(d_logs, inputs.gk, 2)
        per_head = jnp.sum(d_logs, axis=3)
    else:
        per_head = jnp.sum(d_logs, axis=0)
    if inputs.g is not None:
        found["g"] = _shared(per_head, inputs.g, 2)
    if inputs.g_gamma is not None:
        total = jnp.sum(per_head, axis=1)
        if inputs.g_gamma.shape[0] == 1:
            total = jnp.sum(total, axis=0, keepdims=True)
        found["g_gamma"] = _shared(total, inputs.g_gamma, 1)
    return found


def _shared(gradient: Any, like: Any, axis: int) -> Any:
    """The gradient of all H heads, summed over the heads that share one."""
    kept = like.shape[axis]
    if gradient.shape[axis] != kept:
        shape = gradient.shape
        parts = gradient.reshape(*shape[:axis], kept, shape[axis] // kept, *shape[axis + 1 :])
        gradient = jnp.sum(parts.astype(jnp.float32), axis=axis + 1)
    return gradient.astype(like.dtype)


def _nothing(problem: _Problem, d_final: Any) -> LinearRecurrenceInputs:
    """Gradients where no token is in a sequence."""
    inputs = problem.inputs
    zeros = {
        name: None if x is None or name == "cu_seqlens" else vary_like(jnp.zeros(x.shape, x.dtype), inputs)
        for name, x in inputs._asdict().items()
    }
    if inputs.initial_state is not None and d_final is not None:
        zeros["initial_state"] = d_final.astype(inputs.initial_state.dtype)
    return LinearRecurrenceInputs(**zeros)
