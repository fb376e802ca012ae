"""An operation over a sequence that is split over devices, in the place of `Operation.run`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call.partition import vary_like
from ejkernel.compositions.sequence.affine import TRANSITIONS
from ejkernel.compositions.sequence.carry import Shards, carry_of
from ejkernel.compositions.sequence.passing import pass_states
from ejkernel.errors import invalid
from ejkernel.operations.linear_recurrence.transposed import with_key_first


def run(shards: Shards, request: Any, inputs: Any) -> Any:
    """Outputs of a canonical request on this device's tokens; final states are those of the whole sequence, on all devices."""
    index = jax.lax.axis_index(shards.axes)
    if shards.size == 1:
        outputs = request.operation.run(request, inputs)
        final = getattr(outputs, "final_state", None)
        return outputs if final is None else outputs._replace(final_state=shards.of_last(final, jnp.ones((1, 1), bool)))
    varying = jax.tree.map(lambda leaf: vary_like(leaf, (inputs, index)), inputs)
    if request.operation.name == "causal_conv1d":
        return _convolve(shards, request, varying)
    if getattr(request.call, "transposed_state", False):

        def with_call(call: Any, inputs: Any) -> Any:
            return run(shards, dataclasses.replace(request, call=call).reshaped(inputs), inputs)

        return with_key_first(request.call, inputs, with_call)
    if request.operation.name not in TRANSITIONS:  # what works token by token, such as a norm after the recurrence
        return request.operation.run(request, inputs)
    return pass_states(shards, request, varying)


def _convolve(shards: Shards, request: Any, inputs: Any) -> Any:
    """The inputs before a device's first token are the last ones of the device before."""
    halo = request.call.width - 1
    if shards.length < halo:
        remedy = "use fewer devices, or pad the sequence"
        raise invalid("x", f"{shards.length} tokens on a device", f"at least {halo}, what the filter looks back", remedy=remedy)
    rank, given = shards.rank(False), inputs.initial_state
    if given is None:
        given = jnp.zeros((inputs.x.shape[0], request.call.sequences, halo, inputs.x.shape[2]), inputs.x.dtype)
        given = vary_like(given, inputs.x)
    carry = carry_of(dataclasses.replace(shards, seg_ids=None), False)
    fresh, entering, ends, at_tail = carry.fresh, carry.entering, carry.ends, given
    if shards.seg_ids is not None:
        fresh, entering, ends, alone = _runs(shards, halo)
        at_tail = jnp.where(alone[..., None, None], given, 0)
    tail = inputs._replace(
        x=inputs.x[:, -halo:],
        initial_state=at_tail,
        seg_ids=None if inputs.seg_ids is None else inputs.seg_ids[:, -halo:],
        cu_seqlens=None if inputs.cu_seqlens is None else jnp.clip(inputs.cu_seqlens - (shards.length - halo), 0, halo),
    )
    operation, returning = (
        request.operation,
        dataclasses.replace(request, call=dataclasses.replace(request.call, return_state=True)),
    )
    last = operation.run(returning.reshaped(tail), tail).final_state
    pairs = [(device, device + 1) for device in range(shards.size - 1)]
    before = jax.lax.ppermute(last, shards.axes, pairs).astype(given.dtype)
    fresh, entering = (flags[..., None, None] for flags in (fresh, entering & (rank > 0)))
    inputs = inputs._replace(initial_state=jnp.where(entering, before, jnp.where(fresh, given, 0)))
    found = operation.run(returning.reshaped(inputs), inputs)
    if not request.call.return_state:
        return found._replace(final_state=None)
    return found._replace(final_state=shards.of_last(found.final_state, ends))


def _runs(shards: Shards, halo: int) -> tuple[Any, Any, Any, Any]:
    """Bool `[1 or b, 1]`: no run is before this device; its first token goes on with one; the last run is here; and no run that
    the state of the whole sequence does not stand before begins in the last `halo` tokens' first run."""
    ids = vary_like(shards.seg_ids, jax.lax.axis_index(shards.axes))
    rank, part = shards.rank(False), ids >= 0
    some, lasts = shards.gathered((jnp.any(part, axis=1).astype(jnp.int32), ids[:, -1]), False)
    has = some > 0
    places = jnp.arange(shards.size, dtype=jnp.int32)[:, None]
    earlier = jnp.any(has & (places < rank), axis=0)
    joined = (ids[:, 0] >= 0) & (ids[:, 0] == lasts[jnp.maximum(rank - 1, 0)])
    owner = jnp.max(jnp.where(has, places, -1), axis=0)
    owner = jnp.where(owner < 0, shards.size - 1, owner)
    alone = ~earlier & ~jnp.any(part[:, : shards.length - halo], axis=1)
    return tuple(flags[:, None] for flags in (~earlier, joined, owner == rank, alone))  # pyright: ignore[reportReturnType]
