"""Recurrences over devices: states pass between them first, then each runs its tokens from the state that enters.

Forward, every device runs its tokens from zeros, for their final state alone, and gathers the states and transitions of the others.
Backward, it finds the gradient of the state before its tokens from its own outputs alone, and gathers those of the others, which
give it the gradient of the state that it leaves. The two runs of each phase differ in one state only: XLA drops what makes outputs
that nobody reads, and does once what does not depend on that state.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call.partition import vary_like
from ejkernel.compositions.sequence.affine import TRANSITIONS, apply, run_from, transpose
from ejkernel.compositions.sequence.carry import Carry, Devices, Shards, carry_of


def pass_states(shards: Shards, request: Any, inputs: Any) -> Any:
    """Outputs of a canonical request on this device's tokens."""
    operation, wanted = request.operation, "final_state" in request.operation.public(request.call)
    if not wanted:
        request = dataclasses.replace(request, call=dataclasses.replace(request.call, return_state=True))
    spec, given = operation.output_specs(request.call).final_state, inputs.initial_state
    given = vary_like(jnp.zeros(spec.shape, spec.dtype), inputs) if given is None else given.astype(spec.dtype)
    carry = carry_of(shards, _is_reverse(request))
    states = given if len(spec.shape) > 3 else given[:, None]  # of a selective_scan without packed sequences
    run = _differentiable if request.policy.custom_gradients else _run
    out, final = run(Devices(shards.axes, shards.size), request, inputs._replace(initial_state=states), carry)
    return operation.Outputs(out, shards.of_last(final, carry.ends).reshape(spec.shape) if wanted else None)


def _is_reverse(request: Any) -> bool:
    return getattr(request.call, "reverse", False)


def _run(devices: Devices, request: Any, inputs: Any, carry: Carry) -> Any:
    """Outputs, and the states `[b, n, ...]` after this device's tokens; the initial states are those of whole sequences."""
    return run_from(request, _entered(devices, request, inputs, carry)[0])


def _entered(devices: Devices, request: Any, inputs: Any, carry: Carry) -> tuple[Any, Any]:
    """The inputs with the states before this device's tokens, and the transitions of all devices."""
    inputs = inputs._replace(initial_state=carry.initial(inputs.initial_state))
    own = carry.left(run_from(request, inputs)[1])
    # Nothing enters the first device, and nobody needs what passes through the last: two need no transitions.
    transition = () if devices.size == 2 else TRANSITIONS[request.operation.name](request, inputs, carry)
    transitions, states = devices.gathered((transition, own), _is_reverse(request))
    state = _composed(devices.rank(_is_reverse(request)), transitions, states)
    return inputs._replace(initial_state=inputs.initial_state + carry.placed(state)), transitions


def _composed(rank: Any, transitions: Any, states: Any) -> Any:
    """The state that enters the device of this rank from those before it, by what each makes of zeros `[devices, b, ...]`."""
    state = states[0]
    for place in range(1, states.shape[0] - 1):
        transition, own = jax.tree.map(lambda array, place=place: array[place], (transitions, states))
        state = jnp.where(place < rank, apply(transition, state) + own, state)
    return state


_differentiable = jax.custom_vjp(_run, nondiff_argnums=(0, 1))


def _forward(devices: Devices, request: Any, inputs: Any, carry: Carry) -> tuple[Any, Any]:
    entered, transitions = _entered(devices, request, inputs, carry)
    outputs, pull = jax.vjp(functools.partial(run_from, request), entered)
    return outputs, (pull, transitions, carry)


def _backward(devices: Devices, request: Any, residuals: Any, cotangents: Any) -> tuple[Any, None]:
    pull, transitions, carry = residuals
    (d_out, d_final), back, reverse = cotangents, carry.back, not _is_reverse(request)
    states = devices.gathered(back.left(pull((d_out, d_final))[0].initial_state), reverse)
    transitions = transpose(jax.tree.map(lambda array: jnp.flip(array, 0), transitions))
    state = _composed(devices.rank(reverse), transitions, states)
    gradients = pull((d_out, d_final + back.placed(state)))[0]
    return gradients._replace(initial_state=carry.initial(gradients.initial_state)), None


_differentiable.defvjp(_forward, _backward)
