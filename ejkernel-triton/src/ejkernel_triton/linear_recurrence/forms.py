"""Calls that other calls are made of: with a bonus, with value heads wider than a program holds, and with factors of the value that
the kernels do not take.

A bonus: the query reads the state before its token, `scale q_t^T S_(t-1)`, which it would read as the query of the token before. So
queries move by one token, outputs move back, and what the token itself gives, `scale sum(q_t bonus k_t) v_t`, is added.
Channels of value do not mix: wider heads are several calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.call import named, vary_like
from ejkernel.operations.common.heads import repeat_heads
from ejkernel.operations.common.packed import zero_outside
from ejkernel.operations.linear_recurrence.interface import (
    LinearRecurrenceCall,
    LinearRecurrenceInputs,
    LinearRecurrenceOutputs,
)
from ejkernel_triton.linear_recurrence.config import Config
from ejkernel_triton.linear_recurrence.params import WIDEST_VALUE, as_computed

Forward = Callable[[LinearRecurrenceCall, LinearRecurrenceInputs, Config], LinearRecurrenceOutputs]
Backward = Callable[
    [LinearRecurrenceCall, LinearRecurrenceInputs, LinearRecurrenceOutputs, LinearRecurrenceOutputs, Config],
    LinearRecurrenceInputs,
]


class Part(NamedTuple):
    """Channels of value of one call."""

    call: LinearRecurrenceCall
    first: int
    last: int

    def inputs(self, inputs: LinearRecurrenceInputs) -> LinearRecurrenceInputs:
        state = inputs.initial_state
        return inputs._replace(
            value=inputs.value[..., self.first : self.last],
            initial_state=None if state is None else state[..., self.first : self.last],
        )

    def outputs(self, outputs: LinearRecurrenceOutputs) -> LinearRecurrenceOutputs:
        """Of outputs or their gradients, where they are there."""
        return LinearRecurrenceOutputs(*(None if x is None else x[..., self.first : self.last] for x in outputs))


def parts_of(call: LinearRecurrenceCall) -> list[Part]:
    """As few equal parts as programs can hold, in multiples of 16 channels."""
    channels = call.value.shape[3]
    width = -(-channels // -(-channels // WIDEST_VALUE) // 16) * 16
    return [_part(call, first, min(first + width, channels)) for first in range(0, channels, width)]


def _part(call: LinearRecurrenceCall, first: int, last: int) -> Part:
    specs = {"value": call.value, "initial_state": call.initial_state}
    narrow = {
        name: dataclasses.replace(spec, shape=(*spec.shape[:-1], last - first))
        for name, spec in specs.items()
        if spec is not None
    }
    return Part(dataclasses.replace(call, **narrow), first, last)


def forward_in_parts(
    run: Forward, call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs, config: Config
) -> LinearRecurrenceOutputs:
    found = [run(part.call, part.inputs(inputs), config) for part in parts_of(call)]
    return LinearRecurrenceOutputs(*(None if x[0] is None else jnp.concatenate(x, axis=-1) for x in zip(*found, strict=True)))


def backward_in_parts(
    run: Backward,
    call: LinearRecurrenceCall,
    inputs: LinearRecurrenceInputs,
    outputs: LinearRecurrenceOutputs,
    cotangents: LinearRecurrenceOutputs,
    config: Config,
) -> LinearRecurrenceInputs:
    """Gradients of value and state beside each other, those of the others summed."""
    found = [
        run(part.call, part.inputs(inputs), part.outputs(outputs), part.outputs(cotangents), config) for part in parts_of(call)
    ]
    joined = {
        name: jnp.concatenate(given, axis=-1) if name in ("value", "initial_state") else _sum(given)
        for name, given in zip(LinearRecurrenceInputs._fields, zip(*found, strict=True), strict=True)
        if given[0] is not None
    }
    return LinearRecurrenceInputs(**joined)


def _sum(arrays: Any) -> Any:
    total = sum(array.astype(jnp.float32) for array in arrays)
    return jnp.asarray(total).astype(arrays[0].dtype)


def _moved(array: Any, steps: int) -> Any:
    """An array `[b, t, ...]` later by so many tokens, zeros where none was."""
    if steps > 0:
        return jnp.concatenate([jnp.zeros_like(array[:, :steps]), array[:, :-steps]], axis=1)
    return jnp.concatenate([array[:, -steps:], jnp.zeros_like(array[:, steps:])], axis=1)


def _without_bonus(call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs) -> tuple[LinearRecurrenceCall, Any]:
    """The call that a bonus is added to, and its inputs."""
    inner = dataclasses.replace(call, bonus=None)
    return inner, inputs._replace(bonus=None, query=_moved(inputs.query, 1 if call.reverse else -1))


def _own(call: LinearRecurrenceCall, inner_out: Any, inputs: LinearRecurrenceInputs) -> Any:
    """The outputs, from those of moved queries."""
    heads = call.heads[1]

    def wide(array: Any, axis: int = 2) -> Any:
        return jnp.repeat(array.astype(jnp.float32), heads // array.shape[axis], axis=axis)

    query, key, value = wide(inputs.query), wide(inputs.key), wide(inputs.value)
    assert inputs.bonus is not None
    own = jnp.sum(query * wide(inputs.bonus, 1)[:, None] * key, axis=-1, keepdims=True) * value
    out = _moved(inner_out.astype(jnp.float32), -1 if call.reverse else 1) + call.softmax_scale * own
    if inputs.initial_state is None:
        return out.astype(call.value.dtype)
    first = -1 if call.reverse else 0
    read = jnp.einsum("bhd,bhdv->bhv", query[:, first], inputs.initial_state[:, 0].astype(jnp.float32))
    return out.at[:, first].add(call.softmax_scale * read).astype(call.value.dtype)


def forward_with_bonus(
    run: Forward, call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs, config: Config
) -> LinearRecurrenceOutputs:
    found = run(*_without_bonus(call, inputs), config)
    return found._replace(out=_own(call, found.out, inputs))


def backward_with_bonus(
    run: Backward,
    call: LinearRecurrenceCall,
    inputs: LinearRecurrenceInputs,
    outputs: LinearRecurrenceOutputs,
    cotangents: LinearRecurrenceOutputs,
    config: Config,
) -> LinearRecurrenceInputs:
    inner, moved = _without_bonus(call, inputs)
    _, pull = jax.vjp(lambda out, inputs: _own(call, out, inputs), jnp.zeros_like(cotangents.out), inputs)
    d_inner, own = pull(cotangents.out)
    found = run(inner, moved, outputs, cotangents._replace(out=d_inner), config)
    found = found._replace(query=_moved(found.query, -1 if call.reverse else 1))
    gradients = {
        name: _sum([x for x in (getattr(found, name), getattr(own, name)) if x is not None])
        for name, _ in named(inputs)
        if name != "cu_seqlens"
    }
    return LinearRecurrenceInputs(**gradients)


def has_scales(call: LinearRecurrenceCall) -> bool:
    """Whether there are factors of the value, for states or outputs."""
    return call.value_scale is not None or call.skip is not None


def _of_values(
    call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs, value: Any
) -> tuple[LinearRecurrenceCall, LinearRecurrenceInputs]:
    """The call of the values that the state takes, and its inputs."""
    spec = dataclasses.replace(call.value, shape=value.shape)
    inner = dataclasses.replace(call, value=spec, value_scale=None, skip=None)
    return inner, inputs._replace(value=value, value_scale=None, skip=None)


def _values(call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs) -> tuple[Any, Any]:
    """The values that the state takes, and what outputs take of the value, None without a skip."""
    value, scale = inputs.value, inputs.value_scale
    if inputs.cu_seqlens is not None:  # before any product, whose gradient would be 0 * NaN
        part = jnp.arange(value.shape[1], dtype=jnp.int32)[None] < inputs.cu_seqlens[:, -1:]
        value, *scales = zero_outside(part, *(x for x in (value, scale) if x is not None))
        scale = scales[0] if scales else None
    heads, dtype, wide = call.heads[1], value.dtype, value.astype(jnp.float32)
    every = repeat_heads(wide, heads // wide.shape[2], 2)
    written, skipped = wide, None
    if scale is not None:
        written = every * repeat_heads(scale.astype(jnp.float32), heads // scale.shape[2], 2)[..., None]
    if inputs.skip is not None:
        skipped = every * repeat_heads(inputs.skip.astype(jnp.float32), heads // inputs.skip.shape[1], 1)[:, None]
    return written.astype(dtype), skipped


def _in_float32(arrays: Any) -> Any:
    """Arrays of float16 in float32, others as they are."""
    return jax.tree.map(lambda array: array.astype(jnp.float32) if array.dtype == jnp.float16 else array, arrays)


def forward_around_scales(
    run: Forward, call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs, config: Config
) -> LinearRecurrenceOutputs:
    wide = as_computed(call, backward=False)
    if wide != call:
        found = forward_around_scales(run, wide, _in_float32(inputs), config)
        return found._replace(out=found.out.astype(call.value.dtype))
    value, skipped = _values(call, inputs)
    found = run(*_of_values(call, inputs, value), config)
    if skipped is None:
        return found
    return found._replace(out=(found.out.astype(jnp.float32) + skipped).astype(found.out.dtype))


def backward_around_scales(
    run: Backward,
    call: LinearRecurrenceCall,
    inputs: LinearRecurrenceInputs,
    outputs: LinearRecurrenceOutputs,
    cotangents: LinearRecurrenceOutputs,
    config: Config,
) -> LinearRecurrenceInputs:
    wide = as_computed(call, backward=True)
    if wide != call:
        of_outputs = _in_float32(outputs), _in_float32(cotangents)
        found = backward_around_scales(run, wide, _in_float32(inputs), *of_outputs, config)
        dtypes = {name: array.dtype for name, array in named(inputs)}
        return found._replace(**{name: array.astype(dtypes[name]) for name, array in named(found)})
    names = ("value", "value_scale", "skip")
    given = {name: array for name, array in named(inputs) if name in names}
    (value, skipped), pull = jax.vjp(lambda given: _values(call, inputs._replace(**given)), given)
    found = run(*_of_values(call, inputs, value), outputs, cotangents, config)
    d_skipped = None if skipped is None else cotangents.out.astype(jnp.float32)
    return found._replace(**pull((vary_like(found.value, inputs), d_skipped))[0])
