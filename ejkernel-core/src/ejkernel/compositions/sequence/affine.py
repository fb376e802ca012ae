"""What the tokens of one device leave of a state that enters: a linear map of it, the transition.

A diagonal transition is a tuple of factors that broadcast against a state `[b, ...]`; that of the delta rule is a matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.compositions.sequence.carry import Carry
from ejkernel.operations.common.heads import repeat_heads


def run_from(request: Any, inputs: Any) -> tuple[Any, Any]:
    """Outputs and final states of this device's tokens; states are `[b, n, ...]`, whatever those of the operation are."""
    request = request.reshaped(inputs)
    shape = request.operation.output_specs(request.call).final_state.shape
    local = inputs._replace(initial_state=inputs.initial_state.reshape(shape))
    out, final = request.operation.run(request.reshaped(local), local)
    return out, final.reshape(inputs.initial_state.shape)


def delta_rule(request: Any, inputs: Any, carry: Carry) -> Any:
    """A matrix `[b, H, d, d]`: what the rule leaves of the identity, without values to write."""
    value = jnp.zeros((*inputs.value.shape[:3], inputs.key.shape[3]), inputs.value.dtype)
    batch, width = value.shape[0], value.shape[3]
    identity = jnp.broadcast_to(jnp.eye(width, dtype=request.call.state_dtype), (batch, request.call.heads, width, width))
    return carry.left(run_from(request, inputs._replace(value=value, initial_state=carry.placed(identity)))[1])


def linear_recurrence(request: Any, inputs: Any, carry: Carry) -> tuple[Any, ...]:
    """Factors of key channels `[b, H, d or 1, 1]` and of value channels `[b, H, 1, v]`."""
    call = request.call
    of_key, of_value = [], []
    if inputs.g is not None:
        of_key.append(_total(call, inputs.g[..., None]))
    if inputs.g_gamma is not None:
        of_key.append(_total(call, inputs.g_gamma[:, None, :, None]) * call.query.shape[1])
    if inputs.gk is not None:
        of_key.append(_total(call, inputs.gk))
    if inputs.gv is not None:
        of_value.append(_total(call, inputs.gv))
    if call.cu_seqlens is not None:  # without decays, too, what enters need not be what leaves
        of_key.append(jnp.zeros((1, 1, 1), call.state_dtype))
    factors = [(of_key, 3), (of_value, 2)]
    return tuple(_factor(carry, jnp.expand_dims(functools.reduce(jnp.add, logs), axis)) for logs, axis in factors if logs)


def _total(call: Any, logs: Any) -> Any:
    """The sum `[b, H, ...]` of the log decays `[b, t, h, ...]` of all tokens."""
    total = jnp.sum(logs, axis=1, dtype=call.state_dtype)
    return repeat_heads(total, call.heads[1] // total.shape[1], 1)


def selective_scan(request: Any, inputs: Any, carry: Carry) -> tuple[Any, ...]:
    """One factor, `exp(A sum dt)`, `[b, i, n]`."""
    steps = jnp.sum(inputs.dt, axis=1, dtype=inputs.initial_state.dtype)
    rates = jnp.maximum(inputs.A.astype(steps.dtype), jnp.finfo(steps.dtype).min)  # -inf times a dt of 0 would be NaN
    logs = rates * steps[:, :, None]
    if inputs.resets is not None:
        logs = jnp.where(jnp.any(inputs.resets, axis=1)[:, None, None], -jnp.inf, logs)
    return (_factor(carry, logs),)


def _factor(carry: Carry, logs: Any) -> Any:
    """Decays from their logarithms `[b, ...]`; zeros where the state that enters is not the one that leaves."""
    return jnp.exp(jnp.where(carry.passes.reshape(-1, *[1] * (logs.ndim - 1)), logs, -jnp.inf))


TRANSITIONS: Mapping[str, Callable[[Any, Any, Carry], Any]] = {
    "delta_rule": delta_rule,
    "linear_recurrence": linear_recurrence,
    "selective_scan": selective_scan,
}
"""By operation; all of their outputs are `(out, final_state)`."""


def apply(transition: Any, state: Any) -> Any:
    if isinstance(transition, tuple):
        return functools.reduce(jnp.multiply, transition, state)
    return jnp.einsum("bhij,bhjv->bhiv", transition, state, precision=jax.lax.Precision.HIGHEST)


def transpose(transition: Any) -> Any:
    return transition if isinstance(transition, tuple) else transition.swapaxes(-1, -2)
