"""The launches of `delta_rule`.

Forward: `prepare` makes what chunks do to themselves, the walk carries the state through them. Backward makes both again, keeping
the states before chunks; a walk back makes the gradients of states and of values, and the rest is made of all chunks at once. Where
there are few heads, `segment_scan` first finds the states between segments of each sequence, which are then walked in parallel. A
few tokens, and the general form, are walked token after token.

The chunked form is that of Yang et al., Parallelizing Linear Transformers with the Delta Params over Sequence Length, 2024, and of
Gated Delta Networks, 2025.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel.call import vary_like
from ejkernel.operations.delta_rule.interface import DeltaRuleCall, DeltaRuleInputs, DeltaRuleOutputs
from ejkernel.operations.delta_rule.lengths import divided_by_length
from ejkernel.plugin import current_target
from ejkernel_triton._blocks import dot_block
from ejkernel_triton._capability import shared_memory_limit
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.delta_rule import general
from ejkernel_triton.delta_rule.config import Config, GradientConfig, is_general
from ejkernel_triton.delta_rule.gradients import gradient_kernel
from ejkernel_triton.delta_rule.prepare import prepare_channels_kernel, prepare_kernel
from ejkernel_triton.delta_rule.problem import TOKENS, Problem, where, without_segments
from ejkernel_triton.delta_rule.recurrent import recurrent_kernel
from ejkernel_triton.delta_rule.segment_scan import carry_kernel, segment_scan_kernel
from ejkernel_triton.delta_rule.state_scan import state_scan_backward_kernel, state_scan_kernel
from ejkernel_triton.delta_rule.tiles import ROWS

_PREPARED_WIDTH = 64
"""Channels of key that `prepare` loads at a time; half as many in float32, and under decays per channel."""

_CARRIED_BLOCK, _CARRIED_ROWS = 16, 64
"""Channels of value of a program that carries states between segments, and rows of a transition of more than 128 channels that it
holds; smaller ones it holds whole."""

_REPAIR_BLOCK = 32
"""Channels of value that a program holds which repairs outputs."""


class _Prepared(NamedTuple):
    """What `prepare` made; what is absent is replaced by an array that is there.

    read_key, write_key, read_query: keys and queries, with decays per channel under those up to the edges of their chunks.
    inverse, scores `[b, chunks, H, chunk, chunk]`; rows `[b, chunks, H, ROWS, chunk]`, totals `[b, chunks, H, d]`: see `tiles`.
    """

    read_key: Any
    write_key: Any
    read_query: Any
    inverse: Any
    scores: Any
    rows: Any
    totals: Any


class _Chunked(Problem):
    """A call whose a and b come from its keys."""

    def prepare(self) -> _Prepared:
        inputs, heads, width = self.inputs, self.call.heads, self.call.query.shape[3]
        squares = (self.batch, self.chunks, heads)
        square = (*squares, self.chunk, self.chunk), self.dtype
        rows = (*squares, ROWS.value, self.chunk), jnp.float32
        given = *self.or_query(inputs.query, inputs.key, inputs.beta, inputs.decay), self.bounds, self.first, self.sequence
        constants: dict[str, Any] = {
            "grid": self.batch * self.chunks * heads,
            "num_warps": 4,
            "num_stages": 1,
            "R": self.rule,
            "CHUNK": self.chunk,
            "BLOCK_K": min(dot_block(width), _PREPARED_WIDTH // (2 if self.by_channel or not self.rule.bfloat16 else 1)),
            "WHOLE": self.whole,
            "LEVELS": self.chunk.bit_length() - 1,
        }
        numbers = self.length, self.chunks, self.call.sequences
        if not self.by_channel:
            inverse, scores, rows = call_kernel(prepare_kernel, (*given, *numbers), (square, square, rows), **constants)
            return _Prepared(inputs.key, inputs.key, inputs.query, inverse, scores, rows, inputs.query)
        tile = (*self.tokens, width), self.dtype
        outputs = (square, square, tile, tile, tile, ((*squares, width), jnp.float32), rows)
        results = call_kernel(prepare_channels_kernel, (*given, *numbers), outputs, **constants)
        inverse, scores, first, second, third, totals, rows = results
        return _Prepared(first, second, third, inverse, scores, rows, totals)

    def scan_launch(self, config: Config | GradientConfig) -> dict[str, Any]:
        launch = super().scan_launch(config)
        return {**launch, "grid": launch["grid"] * config.segments, "SEGMENTS": config.segments}

    def segment_shape(self, config: Config | GradientConfig) -> tuple[int, ...]:
        """Of a state of every segment of every sequence."""
        return self.batch, self.call.sequences, config.segments, *self.state_shape

    def states_before(self, made: _Prepared, config: Config | GradientConfig, *, to_last: bool = False) -> tuple[Any, Any]:
        """States before segments `[b, n, segments, H, d, v]` and the transitions of segments `[b, n, segments, H, d, d]`.

        to_last: whether the transition of the last segment is wanted.
        """
        initial = self.inputs.initial_state
        if config.segments == 1:
            return initial, None
        launch, width, channels = self.scan_launch(config), self.call.query.shape[3], self.call.value.shape[3]
        blocks = -(-channels // launch["BLOCK_V"]) + -(-width // launch["BLOCK_V"])
        shape = self.segment_shape(config)
        launch["grid"] = self.batch * self.call.sequences * config.segments * self.call.heads * blocks
        local, transitions = call_kernel(
            segment_scan_kernel,
            (
                *(made.read_key, made.write_key, self.inputs.value, made.inverse, made.rows, made.totals),
                *(self.bounds, self.first, self.length, self.chunks, self.call.sequences),
            ),
            ((shape, jnp.float32), ((*shape[:-1], width), jnp.float32)),
            FROM_FIRST=initial is not None,
            TO_LAST=to_last,
            **launch,
        )
        return self.carry(initial, local, transitions, back=False), transitions

    def carry(self, given: Any, local: Any, transitions: Any, *, back: bool) -> Any:
        """States before segments, from those that segments leave of zeros; with `back` the gradients of states after segments."""
        width, channels, block = dot_block(self.call.query.shape[3]), self.call.value.shape[3], _CARRIED_BLOCK
        rows = width if width <= 128 else _CARRIED_ROWS
        prefetching = 4 * (2 * rows * width + block * (rows + width))  # bytes of shared memory
        (carried,) = call_kernel(
            carry_kernel,
            (*self.or_query(given), local, transitions),
            ((local.shape, jnp.float32),),
            grid=self.batch * self.call.sequences * self.call.heads * -(-channels // block),
            num_warps=8 if width > 64 else 4,
            num_stages=2 if prefetching <= shared_memory_limit(current_target()) else 1,
            R=self.rule,
            BLOCK_K=width,
            BLOCK_V=block,
            ROWS=rows,
            SEGMENTS=local.shape[2],
            GIVEN=given is not None,
            BACK=back,
        )
        return carried

    def walk(
        self, made: _Prepared, config: Config | GradientConfig, before: Any, *, out: bool, keep: bool, final: bool
    ) -> list[Any]:
        """Outputs `[b, t, H, v]`, deltas of the same shape, states before chunks `[b, chunks, H, d, v]` and after sequences.

        before: states before segments, or None.
        """
        tile = (*self.tokens, self.call.value.shape[3])
        states = (self.batch, self.chunks, *self.state_shape)
        return call_kernel(
            state_scan_kernel,
            (
                *(made.read_query, made.read_key, made.write_key, self.inputs.value, *made[3:]),
                *(*self.or_query(before), self.bounds, self.first),
                *(self.length, self.chunks, self.call.sequences),
            ),
            (
                (tile if out else (1,), self.call.value.dtype),
                (tile if keep else (1,), self.dtype),
                (states if keep else (1,), self.dtype),
                (self.final_shape if final else (1,), jnp.float32),
            ),
            INITIAL=before is not None,
            OUT=out,
            KEEP=keep,
            FINAL=final,
            **self.scan_launch(config),
        )

    def gradients_after(self, made: _Prepared, config: GradientConfig, d_out: Any, d_final: Any, transitions: Any) -> Any:
        """The gradients of states after segments `[b, n, segments, H, d, v]`, or None."""
        if config.segments == 1:
            return d_final
        *_, local = self.walk_back(made, config, d_out, None, keep=False)
        return self.carry(d_final, local, transitions, back=True)

    def walk_back(self, made: _Prepared, config: GradientConfig, d_out: Any, d_after: Any, *, keep: bool = True) -> list[Any]:
        """The gradients of values `[b, t, H, v]`, of states after chunks `[b, chunks, H, d, v]` and before sequences, from those of
        states after segments; without `keep` only those before segments, but the first."""
        return call_kernel(
            state_scan_backward_kernel,
            (
                *(made.read_query, made.read_key, made.write_key, d_out, *made[3:]),
                *(*self.or_query(d_after), self.bounds, self.first, self.length, self.chunks, self.call.sequences),
            ),
            (
                ((*self.tokens, self.call.value.shape[3]) if keep else (1,), self.dtype),
                ((self.batch, self.chunks, *self.state_shape) if keep else (1,), self.dtype),
                (self.final_shape if keep else self.segment_shape(config), jnp.float32),
            ),
            KEEP=keep,
            FINAL=d_after is not None,
            **self.scan_launch(config),
        )

    def gradients(self, made: _Prepared, config: GradientConfig, arrays: tuple[Any, ...]) -> list[Any]:
        """Of query and key `[b, t, H, d]`, and, per block of channels of key, of beta and decays `[blocks, b, t, H]`.

        arrays: deltas, and the gradients of outputs and values; states before chunks, and the gradients of those after chunks.
        """
        inputs, width = self.inputs, self.call.query.shape[3]
        rows = min(config.gradient_block_k, dot_block(width))
        blocks = -(-width // rows)
        tile, parts = (*self.tokens, width), (blocks, *self.tokens)
        decays = tile if self.by_channel else parts if inputs.decay is not None else (1,)
        dtypes = (x.dtype if x.shape[2] == self.call.heads and not self.blocked_lengths(config) else jnp.float32
                  for x in (inputs.query, inputs.key))  # fmt: skip
        return call_kernel(
            gradient_kernel,
            (
                *self.or_query(inputs.query, inputs.key, inputs.beta, inputs.decay),
                *(*arrays, made.rows, self.bounds, self.first, self.sequence),
                *(self.length, self.chunks, self.call.sequences),
            ),
            (
                *((tile, dtype) for dtype in dtypes),
                (parts if inputs.beta is not None else (1,), jnp.float32),
                (decays, jnp.float32),
            ),
            grid=self.batch * self.chunks * self.call.heads * blocks,
            num_warps=config.gradient_num_warps,
            num_stages=config.num_stages,
            R=self.rule,
            CHUNK=self.chunk,
            BLOCK_K=rows,
            BLOCK_V=min(config.gradient_block_v, dot_block(self.call.value.shape[3])),
            WHOLE=self.whole,
            LEVELS=self.chunk.bit_length() - 1,
        )

    def blocked_lengths(self, config: GradientConfig) -> bool:
        """Whether gradients go through the lengths of rows outside of the kernel, which has not seen whole rows."""
        return self.call.use_qk_l2norm and config.gradient_block_k < self.call.query.shape[3]


def _zero_size(call: DeltaRuleCall) -> bool:
    return call.query.size * call.value.size * call.sequences == 0


def forward(call: DeltaRuleCall, inputs: DeltaRuleInputs, config: Config) -> DeltaRuleOutputs:
    if _zero_size(call):
        out = vary_like(jnp.zeros((*call.query.shape[:2], call.heads, call.value.shape[3]), call.value.dtype), inputs)
        return DeltaRuleOutputs(out, _initial(call, inputs) if call.return_state else None)
    without = (call, inputs) if call.seg_ids is None else without_segments(call, inputs)[:2]
    problem = _Chunked(*without, config.chunk_size)
    if not config.chunk_size:
        out, final = _step_by_step(problem, config.block_v, config.num_warps, config.num_stages)
        return DeltaRuleOutputs(out, final if call.return_state else None)
    if is_general(call):
        out, final = general.forward(call, inputs, config)
    else:
        made = problem.prepare()
        before, _ = problem.states_before(made, config)
        out, _, _, final = problem.walk(made, config, before, out=True, keep=False, final=call.return_state)
    if problem.length > 1:
        out, _ = _step_by_step(problem, _REPAIR_BLOCK, 4, 1, found=out)
    return DeltaRuleOutputs(out, final if call.return_state else None)


def _step_by_step(problem: Problem, block: int, warps: int, stages: int, found: Any = None) -> list[Any]:
    """Outputs and final states; given outputs, only those of sequences whose last one is not finite are made again."""
    call, inputs = problem.call, problem.inputs
    channels, final = call.value.shape[3], call.return_state and found is None
    block = min(block, dot_block(channels))
    arrays = problem.or_query(*(getattr(inputs, name) for name in TOKENS), inputs.initial_state)
    arrays = (*arrays, problem.bounds, problem.first, inputs.query if found is None else found)
    return call_kernel(
        recurrent_kernel,
        (*arrays, problem.length, call.sequences),
        (((*problem.tokens, channels), call.value.dtype), (problem.final_shape if final else (1,), jnp.float32)),
        grid=problem.batch * problem.sequences * call.heads * -(-channels // block),
        num_warps=warps,
        input_output_aliases=None if found is None else {len(arrays) - 1: 0},
        R=problem.rule,
        BLOCK_K=dot_block(call.query.shape[3]),
        BLOCK_V=block,
        INITIAL=inputs.initial_state is not None,
        FINAL=final,
        DEPTH=stages,
        REPAIR=found is not None,
    )


def _initial(call: DeltaRuleCall, inputs: DeltaRuleInputs) -> Any:
    if inputs.initial_state is not None:
        return inputs.initial_state.astype(jnp.float32)
    batch, _, _, width = call.query.shape
    shape = (batch, call.sequences, call.heads, width, call.value.shape[3])
    return vary_like(jnp.zeros(shape, jnp.float32), inputs)


def backward(
    call: DeltaRuleCall,
    inputs: DeltaRuleInputs,
    outputs: DeltaRuleOutputs,
    cotangents: DeltaRuleOutputs,
    config: GradientConfig,
) -> DeltaRuleInputs:
    given, d_final, part = inputs, cotangents.final_state, None
    if _zero_size(call):
        return _nothing(inputs, d_final)
    if is_general(call):
        return general.backward(call, inputs, cotangents, config)
    if call.seg_ids is not None:
        call, inputs, part = without_segments(call, inputs)
    problem = _Chunked(call, inputs, config.chunk_size)
    made = problem.prepare()
    before, transitions = problem.states_before(made, config, to_last=d_final is not None)
    _, delta, states, _ = problem.walk(made, config, before, out=False, keep=True, final=False)
    d_after = problem.gradients_after(made, config, cotangents.out, d_final, transitions)
    d_value, d_states, d_initial = problem.walk_back(made, config, cotangents.out, d_after)
    arrays = delta, cotangents.out, d_value, states, d_states
    d_query, d_key, d_beta, d_decay = problem.gradients(made, config, arrays)
    if problem.blocked_lengths(config):
        query, key = inputs.query, inputs.key
        if inputs.cu_seqlens is not None:  # tokens after the last sequence may hold NaN
            inside = jnp.arange(problem.length, dtype=jnp.int32)[None] < inputs.cu_seqlens[:, -1:]
            query, key = where(inside, query), where(inside, key)
        d_query, d_key = _through_length(d_query, query), _through_length(d_key, key)
    found = {"query": d_query, "key": d_key, "value": d_value}
    if given.beta is not None:
        found["beta"] = jnp.sum(d_beta, axis=0)
    if given.decay is not None:
        found["decay"] = d_decay if problem.by_channel else jnp.sum(d_decay, axis=0)
    shared = {name: _shared(gradient, getattr(given, name)) for name, gradient in found.items()}
    if part is not None:
        shared = {name: where(part, gradient) for name, gradient in shared.items()}
    return DeltaRuleInputs(**shared, initial_state=None if given.initial_state is None else d_initial)


def _shared(gradient: Any, like: Any) -> Any:
    """The gradient of all H heads, summed over the heads that share one."""
    if gradient.shape[2] != like.shape[2]:
        batch, length, heads, *rest = gradient.shape
        parts = gradient.reshape(batch, length, like.shape[2], heads // like.shape[2], *rest)
        gradient = jnp.sum(parts.astype(jnp.float32), axis=3)
    return gradient.astype(like.dtype)


def _through_length(gradient: Any, array: Any) -> Any:
    """The gradient of rows that are divided by their length, from that where the length is a constant, for all heads."""
    heads = gradient.shape[2]
    array = (array if array.shape[2] == heads else jnp.repeat(array, heads // array.shape[2], axis=2)).astype(jnp.float32)
    array = divided_by_length(array)
    return gradient - array * jnp.sum(gradient * array, axis=-1, keepdims=True)


def _nothing(inputs: DeltaRuleInputs, d_final: Any) -> DeltaRuleInputs:
    """Gradients where no token is in a sequence."""
    zeros = {
        name: None if getattr(inputs, name) is None else vary_like(jnp.zeros_like(getattr(inputs, name)), inputs)
        for name in (*TOKENS, "initial_state")
    }
    if inputs.initial_state is not None and d_final is not None:
        zeros["initial_state"] = d_final
    return DeltaRuleInputs(**zeros)
