"""The recurrence token by token, relative to the largest exponent so far."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.operations.rwkv4.interface import NOTHING_SEEN, Rwkv4Call, Rwkv4Inputs, Rwkv4Outputs
from ejkernel.utils.dtypes import accumulator
from ejkernel_xla._chunks import ChunkLoop
from ejkernel_xla._scan import over_tokens, run_backward, run_forward
from ejkernel_xla.rwkv4.config import Rwkv4Config

_FORGETS = 80.0
"""From this w on, which is `exp(80)` in the exponent, nothing is left; the exponent and its gradient stay finite in float32."""


class _Shared(NamedTuple):
    """w, u `[1 or b, c]`."""

    w: Any
    u: Any


class _Tokens(NamedTuple):
    """k, v `[b, t, c]`."""

    k: Any
    v: Any


class _State(NamedTuple):
    """Numerator and denominator, both divided by `exp(exponent)`; each `[b, c]`."""

    numerator: Any
    denominator: Any
    exponent: Any


class _Problem:
    """The arrays of one call, prepared for the walk over chunks."""

    def __init__(self, call: Rwkv4Call, inputs: Rwkv4Inputs, config: Rwkv4Config) -> None:
        self.config, self.dtype = config, accumulator(call.v.dtype)
        batch, length, channels = call.k.shape
        self.chunks = ChunkLoop(batch, length, max(min(config.chunk_size, length), 1))
        self.tokens = _Tokens(self.chunks.prepare(inputs.k), self.chunks.prepare(inputs.v))
        self.shared = _Shared(inputs.w.astype(self.dtype), inputs.u.astype(self.dtype))
        zeros = jnp.zeros((batch, channels), self.dtype)
        given = inputs.state
        self.first = _State(zeros, zeros, zeros + NOTHING_SEEN) if given is None else self.unstacked(given)

    def unstacked(self, state: Any) -> _State:
        return _State(*(state[:, index].astype(self.dtype) for index in range(3)))

    def run(self, shared: _Shared, state: _State, tokens: _Tokens, valid: Any) -> tuple[_State, Any]:
        """The state after a chunk and its outputs `[b, c, channels]`."""
        log_decay = -jnp.exp(jnp.minimum(shared.w, _FORGETS))

        def step(state: _State, token: _Tokens) -> tuple[_State, Any]:
            return _write(state, log_decay, token), _read(state, shared.u, token)

        return over_tokens(step, state, tokens, valid, self.config.unroll)


def _read(state: _State, bonus: Any, token: _Tokens) -> Any:
    logit = bonus + token.k
    # The mean does not depend on what its weights are relative to, so the maximum needs no derivative.
    top = jax.lax.stop_gradient(jnp.maximum(state.exponent, logit))
    old, new = jnp.exp(state.exponent - top), jnp.exp(logit - top)
    return (old * state.numerator + new * token.v) / (old * state.denominator + new)


def _write(state: _State, log_decay: Any, token: _Tokens) -> _State:
    before = state.exponent + log_decay
    top = jnp.where(before >= token.k, before, token.k)
    old, new = jnp.exp(before - top), jnp.exp(token.k - top)
    return _State(old * state.numerator + new * token.v, old * state.denominator + new, top)


def forward(call: Rwkv4Call, inputs: Rwkv4Inputs, config: Rwkv4Config) -> Rwkv4Outputs:
    problem = _Problem(call, inputs, config)
    state, out = problem.first, jnp.zeros(call.v.shape, call.v.dtype)
    if problem.chunks.count:
        state, out = run_forward(
            problem.chunks, problem.run, problem.shared, problem.first, problem.tokens, call.v.dtype, inputs
        )
    return Rwkv4Outputs(out, jnp.stack(state, axis=1) if call.return_state else None)


def backward(
    call: Rwkv4Call, inputs: Rwkv4Inputs, outputs: Rwkv4Outputs, cotangents: Rwkv4Outputs, config: Rwkv4Config
) -> Rwkv4Inputs:
    problem = _Problem(call, inputs, config)
    final = cotangents.final_state
    d_state = jax.tree.map(jnp.zeros_like, problem.first) if final is None else problem.unstacked(final)
    d_shared, d_tokens = jax.tree.map(jnp.zeros_like, (problem.shared, problem.tokens))
    if problem.chunks.count:
        d_shared, d_state, d_tokens = run_backward(
            problem.chunks,
            problem.run,
            problem.shared,
            problem.first,
            problem.tokens,
            d_state,
            cotangents.out,
            (inputs, cotangents),
        )
    found = {**d_tokens._asdict(), **d_shared._asdict(), "state": jnp.stack(d_state, axis=1)}

    def shaped(name: str) -> Any:
        like = getattr(inputs, name)
        return None if like is None else found[name].astype(like.dtype)

    return Rwkv4Inputs(**{name: shaped(name) for name in Rwkv4Inputs._fields})
