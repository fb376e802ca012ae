"""A loop over chunks that carries the states. Backward recomputes the states between chunks, then differentiates one chunk at a
time in reverse order."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.operations.linear_recurrence.interface import (
    LinearRecurrenceCall,
    LinearRecurrenceInputs,
    LinearRecurrenceOutputs,
)
from ejkernel.operations.linear_recurrence.transposed import pulled_with_key_first, with_key_first
from ejkernel_xla._chunks import ChunkLoop
from ejkernel_xla._numerics import finite_logs
from ejkernel_xla.linear_recurrence.by_token import TokenByToken
from ejkernel_xla.linear_recurrence.chunk import Chunk, Shared, Tokens
from ejkernel_xla.linear_recurrence.config import LinearRecurrenceConfig


class _Problem:
    """Arrays with their heads as `[k, r]`, prepared for the walk."""

    def __init__(self, call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs, config: LinearRecurrenceConfig) -> None:
        self.call, self.inputs = call, inputs
        self.dtype = jnp.dtype(call.state_dtype)
        self.fewest, self.most = call.heads
        self.batch, length = call.query.shape[:2]
        size, block = _sizes(call, config, length)
        self.chunks = ChunkLoop(self.batch, length, size, bounds=inputs.cu_seqlens, reverse=call.reverse)
        self.chunk = (TokenByToken if config.token_by_token and size > 1 else Chunk)(call, size, block)
        self.tokens = Tokens(*(self.chunks.prepare(self.grouped(getattr(inputs, name), 2)) for name in Tokens._fields))
        shared = Shared(*(self.grouped(getattr(inputs, name), 1) for name in Shared._fields))
        shared = jax.tree.map(lambda array: array.astype(self.dtype), shared)
        self.shared = shared if shared.g_gamma is None else shared._replace(g_gamma=finite_logs(shared.g_gamma))
        self.initial = self._initial()

    def grouped(self, array: Any, axis: int) -> Any:
        if array is None:
            return None
        return array.reshape(*array.shape[:axis], self.fewest, array.shape[axis] // self.fewest, *array.shape[axis + 1 :])

    def _initial(self) -> Any:
        """The states before the first tokens `[x,n,k,r,d,v]`; r = 1 if all heads of a group have the same."""
        given = self.inputs.initial_state
        if given is not None:
            return self.grouped(given, 2).astype(self.dtype)
        per_head = [spec.shape[2] for name, spec in _specs(self.call) if name != "query" and spec is not None]
        if self.call.g_gamma is not None:
            per_head.append(self.call.g_gamma.shape[1])
        shape = (self.batch, self.call.sequences, self.fewest, max(per_head) // self.fewest)
        return jnp.zeros((*shape, self.call.query.shape[3], self.call.value.shape[3]), self.dtype)

    def at(self, step: Any) -> Tokens:
        """The tokens of a chunk, 0 where there is none; log decays are not -inf."""
        valid = self.chunks.valid(step)

        def clean(array: Any) -> Any:
            piece = self.chunks.piece(array, step).astype(self.dtype)
            return piece if valid is None else jnp.where(valid.reshape(*valid.shape, *[1] * (piece.ndim - 2)), piece, 0)

        tokens = jax.tree.map(clean, self.tokens)
        logs = {name: getattr(tokens, name) for name in ("g", "gk", "gv")}
        return tokens._replace(**{name: None if array is None else finite_logs(array) for name, array in logs.items()})

    def run(self, state: Any, tokens: Tokens, shared: Shared, valid: Any) -> tuple[Any, Any]:
        """The state after a chunk and its outputs."""
        state, out = self.chunk.run(state, _scaled(tokens), shared, valid)
        return state, out if shared.skip is None else out + shared.skip[:, None] * tokens.value

    def advance(self, state: Any, tokens: Tokens, valid: Any) -> Any:
        """The state after a chunk."""
        return self.chunk.advance(state, _scaled(tokens), self.shared, valid)

    def before(self, state: Any, step: Any) -> Any:
        """The state before a chunk."""
        return self.chunks.begin(state, self.initial, step) if self.chunks.packed else state

    def every_head(self, states: Any) -> Any:
        """States or their gradients as `[x,n,H,d,v]`."""
        shape = (*states.shape[:3], self.most // self.fewest, *states.shape[4:])
        return jnp.broadcast_to(states, shape).reshape(*shape[:2], self.most, *shape[4:])

    def d_final(self, cotangent: Any) -> Any:
        """The gradient of the last states, shaped like `initial`."""
        if cotangent is None:
            return jnp.zeros_like(self.initial)
        d_final = self.grouped(cotangent, 2).astype(self.dtype)
        return d_final if d_final.shape == self.initial.shape else jnp.sum(d_final, axis=3, keepdims=True)

    @property
    def first(self) -> Any:
        """What the loop carries before the first chunk."""
        return jnp.zeros_like(self.initial[:, 0]) if self.chunks.packed else self.initial[:, 0]


def _scaled(tokens: Tokens) -> Tokens:
    """With the values that the state takes."""
    if tokens.value_scale is None:
        return tokens
    return tokens._replace(value=tokens.value * tokens.value_scale[..., None], value_scale=None)


def _sizes(call: LinearRecurrenceCall, config: LinearRecurrenceConfig, length: int) -> tuple[int, int]:
    """Tokens of a chunk and of a block, no more than the sequence needs."""
    if call.gk is None and call.gv is None:
        size = max(min(config.chunk_size, length), 1)
        return size, size
    block = max(min(config.block_size, length), 1)
    return min(config.chunk_size // config.block_size, max(-(-length // block), 1)) * block, block


def forward(
    call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs, config: LinearRecurrenceConfig
) -> LinearRecurrenceOutputs:
    if call.transposed_state:
        return with_key_first(call, inputs, lambda call, inputs: forward(call, inputs, config))
    problem = _Problem(call, inputs, config)
    chunks = problem.chunks
    states = problem.initial
    if chunks.count:

        def step(carry: tuple[Any, Any], index: Any) -> tuple[tuple[Any, Any], Any]:
            state, states = carry
            state, out = problem.run(problem.before(state, index), problem.at(index), problem.shared, chunks.valid(index))
            if chunks.packed and call.return_state:
                states = chunks.write(states, state, index, at_first=False)
            return (state, states), out.astype(call.value.dtype)

        kept = states if chunks.packed and call.return_state else None
        (state, kept), pieces = chunks.loop(step, (problem.first, kept), inputs)
        states = state[:, None] if kept is None else kept
        out = chunks.restore(pieces)
        out = out.reshape(*out.shape[:2], problem.most, out.shape[-1])
    else:
        out = jnp.zeros((*call.query.shape[:2], problem.most, call.value.shape[3]), call.value.dtype)
    return LinearRecurrenceOutputs(out, problem.every_head(states) if call.return_state else None)


class _Pulled(NamedTuple):
    """What the backward loop carries: gradients of the state, of what tokens share and of packed sequences' first states."""

    state: Any
    shared: Shared
    initial: Any


def backward(
    call: LinearRecurrenceCall,
    inputs: LinearRecurrenceInputs,
    outputs: LinearRecurrenceOutputs,
    cotangents: LinearRecurrenceOutputs,
    config: LinearRecurrenceConfig,
) -> LinearRecurrenceInputs:
    if call.transposed_state:
        return pulled_with_key_first(
            call, inputs, cotangents, lambda call, inputs, cotangents: backward(call, inputs, outputs, cotangents, config)
        )
    problem = _Problem(call, inputs, config)
    chunks, like = problem.chunks, (inputs, cotangents)
    d_final = problem.d_final(cotangents.final_state)
    zeros = jax.tree.map(jnp.zeros_like, problem.shared)
    if not chunks.count:
        d_tokens = {name: None if spec is None else jnp.zeros(spec.shape) for name, spec in _specs(call)}
        return _gradients(problem, d_tokens, zeros, d_final)
    d_out = chunks.prepare(problem.grouped(cotangents.out, 2))
    befores = _states_between(problem, like)

    def step(carry: _Pulled, index: Any) -> tuple[_Pulled, Tokens]:
        valid = chunks.valid(index)
        d_state = chunks.end(carry.state, d_final, index) if chunks.packed else carry.state
        d_rows = chunks.piece(d_out, index).astype(problem.dtype)
        d_rows = d_rows if valid is None else jnp.where(valid[:, :, None, None, None], d_rows, 0)
        before = jax.lax.dynamic_index_in_dim(befores, index, keepdims=False)
        _, pull = jax.vjp(functools.partial(problem.run, valid=valid), before, problem.at(index), problem.shared)
        d_state, d_tokens, d_shared = pull((d_state, d_rows))
        d_initial = carry.initial
        if chunks.packed:
            if d_initial is not None:
                d_initial = chunks.write(d_initial, d_state, index, at_first=True)
            d_state = chunks.forget_before(d_state, index)
        narrow = jax.tree.map(lambda gradient, array: gradient.astype(array.dtype), d_tokens, problem.tokens)
        return _Pulled(d_state, jax.tree.map(jnp.add, carry.shared, d_shared), d_initial), narrow

    kept = d_final if chunks.packed and inputs.initial_state is not None else None
    start = _Pulled(jnp.zeros_like(d_final[:, 0]) if chunks.packed else d_final[:, 0], zeros, kept)
    last, pieces = chunks.loop(step, start, like, reverse=True)
    d_tokens = {name: chunks.restore(piece) for name, piece in pieces._asdict().items()}
    return _gradients(problem, d_tokens, last.shared, last.state[:, None] if kept is None else last.initial)


def _specs(call: LinearRecurrenceCall) -> list[tuple[str, Any]]:
    return [(name, getattr(call, name)) for name in Tokens._fields]


def _states_between(problem: _Problem, like: Any) -> Any:
    """The state before every chunk `[m,x,k,r,d,v]`."""
    chunks = problem.chunks

    def step(state: Any, index: Any) -> tuple[Any, Any]:
        before = problem.before(state, index)
        return problem.advance(before, problem.at(index), chunks.valid(index)), before

    return chunks.loop(step, problem.first, like)[1]


def _gradients(problem: _Problem, d_tokens: dict[str, Any], d_shared: Shared, d_initial: Any) -> LinearRecurrenceInputs:
    found = {**d_tokens, **d_shared._asdict(), "initial_state": d_initial}

    def shaped(name: str, gradient: Any) -> Any:
        like = getattr(problem.inputs, name)
        return None if like is None else gradient.reshape(like.shape).astype(like.dtype)

    return LinearRecurrenceInputs(**{name: shaped(name, gradient) for name, gradient in found.items()})
