"""The selective scan, chunk by chunk; a padded token has dt = 0, which leaves the state as it is."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.operations.selective_scan.interface import SelectiveScanCall, SelectiveScanInputs, SelectiveScanOutputs
from ejkernel.utils.dtypes import accumulator
from ejkernel_xla._chunks import ChunkLoop
from ejkernel_xla._scan import over_tokens, run_backward, run_forward
from ejkernel_xla.selective_scan.config import SelectiveScanConfig


class _Tokens(NamedTuple):
    """x, dt `[b, t, i]`; B, C `[b, t, n]`; reset `[b, t]` or None, 1 where the state becomes 0 before the token, else 0."""

    x: Any
    dt: Any
    B: Any
    C: Any
    reset: Any


class _Shared(NamedTuple):
    """A `[1 or b, i, n]`; D `[1 or b, i]` or None."""

    A: Any
    D: Any


class _Problem:
    """The arrays of one call, prepared for the walk over chunks."""

    def __init__(self, call: SelectiveScanCall, inputs: SelectiveScanInputs, config: SelectiveScanConfig) -> None:
        self.config, self.dtype = config, accumulator(call.x.dtype)
        batch, length, _ = call.x.shape
        self.chunks = ChunkLoop(batch, length, max(min(config.chunk_size, length), 1), bounds=inputs.cu_seqlens)
        reset = None if inputs.resets is None else jnp.broadcast_to(inputs.resets, (batch, length)).astype(self.dtype)
        self.tokens = _Tokens(*(self.chunks.prepare(array) for array in (inputs.x, inputs.dt, inputs.B, inputs.C, reset)))
        # -inf times the dt of 0 of a padded token would be NaN.
        lowest = jnp.maximum(inputs.A.astype(self.dtype), jnp.finfo(self.dtype).min)
        self.shared = _Shared(lowest, None if inputs.D is None else inputs.D.astype(self.dtype))
        zeros = jnp.zeros(call.state_shape, self.dtype)
        self.first = zeros if inputs.initial_state is None else inputs.initial_state.astype(self.dtype)

    def run(self, shared: _Shared, state: Any, tokens: _Tokens, valid: Any) -> tuple[Any, Any]:
        """The state after a chunk and its outputs `[b, c, i]`."""
        if self.chunks.packed:
            tokens = jax.tree.map(
                lambda array: jnp.where(valid.reshape(*valid.shape, *[1] * (array.ndim - 2)), array, 0), tokens
            )
        if self.config.associative:
            state, out = _at_once(shared, state, tokens)
        else:
            state, out = over_tokens(lambda h, token: _step(shared, h, token), state, tokens, None, self.config.unroll)
        return state, out if shared.D is None else out + shared.D[:, None] * tokens.x


def _terms(shared: _Shared, tokens: _Tokens) -> tuple[Any, Any]:
    """Decay and input of the state, `[..., i, n]`, for tokens with any leading axes."""
    decay = jnp.exp(shared.A * tokens.dt[..., None])
    if tokens.reset is not None:
        decay = decay * (1 - tokens.reset[..., None, None])
    return decay, (tokens.dt * tokens.x)[..., None] * tokens.B[..., None, :]


def _step(shared: _Shared, state: Any, token: _Tokens) -> tuple[Any, Any]:
    decay, written = _terms(shared, token)
    state = decay * state + written
    return state, jnp.sum(state * token.C[:, None, :], axis=2)


def _at_once(shared: _Shared, state: Any, tokens: _Tokens) -> tuple[Any, Any]:
    decay, written = _terms(shared._replace(A=shared.A[:, None]), tokens)
    written = written.at[:, 0].add(decay[:, 0] * state)

    def after(left: Any, right: Any) -> Any:
        return left[0] * right[0], left[1] * right[0] + right[1]

    _, states = jax.lax.associative_scan(after, (decay, written), axis=1)
    return states[:, -1], jnp.sum(states * tokens.C[:, :, None, :], axis=3)


def forward(call: SelectiveScanCall, inputs: SelectiveScanInputs, config: SelectiveScanConfig) -> SelectiveScanOutputs:
    problem = _Problem(call, inputs, config)
    if not problem.chunks.count:
        return SelectiveScanOutputs(jnp.zeros(call.x.shape, call.x.dtype), problem.first)
    state, out = run_forward(problem.chunks, problem.run, problem.shared, problem.first, problem.tokens, call.x.dtype, inputs)
    return SelectiveScanOutputs(out, state)


def backward(
    call: SelectiveScanCall,
    inputs: SelectiveScanInputs,
    outputs: SelectiveScanOutputs,
    cotangents: SelectiveScanOutputs,
    config: SelectiveScanConfig,
) -> SelectiveScanInputs:
    problem = _Problem(call, inputs, config)
    d_state = cotangents.final_state.astype(problem.dtype)
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
    found = {**d_tokens._asdict(), **d_shared._asdict(), "initial_state": d_state}

    def shaped(name: str) -> Any:
        like = getattr(inputs, name)
        return None if like is None or name not in found else found[name].astype(like.dtype)

    return SelectiveScanInputs(**{name: shaped(name) for name in SelectiveScanInputs._fields})
