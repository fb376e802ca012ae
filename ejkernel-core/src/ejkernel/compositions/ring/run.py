"""Both phases: `flash_attention` on every block that passes, by whatever platform runs it, put together by its log-sum-exp.

Forward merges normalised outputs. Backward sends the keys round once more, with the sums of their gradients behind them, and
gives `flash_attention`'s backward phase the output and log-sum-exp of *all* keys, from which it makes the true probabilities.
Source: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers for Near-Infinite Context, 2023.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel._dispatch.execution import run_forward
from ejkernel._pipeline.batching import batched_backward, batched_forward
from ejkernel.call.partition import vary_like
from ejkernel.call.request import Request
from ejkernel.compositions.axes import Axes, rotated
from ejkernel.compositions.ring.plan import Block, Stage, Structure, may_see, positions_of
from ejkernel.operations.flash_attention.interface import FlashAttentionInputs, FlashAttentionOutputs


@dataclasses.dataclass(frozen=True)
class Ring:
    """The static part of one ring.

    Attributes:
        request: `flash_attention` of one shard's queries and keys.
        axes: mesh axes over which the sequence is split.
        size: number of devices.
        layout: order of the tokens.
        stages: what to do at which shift.
    """

    request: Request
    axes: Axes
    size: int
    layout: str
    stages: tuple[Stage, ...]

    def request_for(self, block: Block, inputs: FlashAttentionInputs) -> Request:
        call = dataclasses.replace(
            self.request.call,
            save_residuals=True,
            softmax_aux=None,
            query_positions=None,
            key_positions=None,
            **block.structure._asdict(),
        )
        return dataclasses.replace(self.request, call=call).reshaped(inputs)


class Travelling(NamedTuple):
    """What goes round: keys `[B,S,K,D]`, values `[B,S,K,V]` and, where they were given, their segments and positions."""

    key: Any
    value: Any
    segments: Any
    positions: Any


class Rows(NamedTuple):
    """Attention to the keys seen so far: normalised output float32 `[B,T,H,V]` and its lse `[B,T,H]`."""

    out: Any
    lse: Any


class Sums(NamedTuple):
    """Gradients so far, float32. Those of key and value belong to the block that travels, the others to this device."""

    query: Any
    key: Any
    value: Any
    bias: Any


def run(ring: Ring, inputs: FlashAttentionInputs) -> FlashAttentionOutputs:
    """Attention of this device's queries to the keys of all."""
    inputs = jax.tree.map(lambda leaf: vary_like(leaf, (inputs, jax.lax.axis_index(ring.axes))), inputs)
    if not ring.request.policy.custom_gradients:
        return _public(ring, _forward(ring, inputs))
    return _differentiable(ring, inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(ring: Ring, inputs: FlashAttentionInputs) -> FlashAttentionOutputs:
    return _public(ring, _forward(ring, inputs))


def _differentiable_forward(ring: Ring, inputs: FlashAttentionInputs) -> Any:
    from jax.ad_checkpoint import checkpoint_name

    found = _forward(ring, inputs)
    outputs = FlashAttentionOutputs(
        checkpoint_name(found.out, "ring_attention.out"), checkpoint_name(found.lse, "ring_attention.lse")
    )
    return _public(ring, outputs), (inputs, outputs)


def _differentiable_backward(ring: Ring, residuals: Any, cotangents: FlashAttentionOutputs) -> Any:
    inputs, outputs = residuals
    sums = _backward(ring, inputs, outputs, cotangents)
    sinks = None if inputs.softmax_aux is None else _sinks(ring, inputs, outputs, cotangents)
    wide = FlashAttentionInputs(*sums[:3], bias=sums.bias, softmax_aux=sinks)
    return (FlashAttentionInputs(*(None if x is None else x.astype(y.dtype) for x, y in zip(wide, inputs, strict=True))),)


_differentiable.defvjp(_differentiable_forward, _differentiable_backward)


def _public(ring: Ring, outputs: FlashAttentionOutputs) -> FlashAttentionOutputs:
    return outputs if ring.request.call.return_lse else outputs._replace(lse=None)


# Forward


def _forward(ring: Ring, inputs: FlashAttentionInputs) -> FlashAttentionOutputs:
    batch, queries, heads, _ = inputs.query.shape
    out = jnp.zeros((batch, queries, heads, inputs.value.shape[3]), jnp.float32)
    rows = vary_like(Rows(out, jnp.full(out.shape[:3], -jnp.inf, jnp.float32)), inputs)
    moving, at = _travelling(inputs), 0
    for stage in ring.stages:
        moving = _sent(ring, moving, stage.first - at)
        if stage.shifts == 1:
            rows, at = _absorbed(ring, inputs, stage, moving, stage.first, rows), stage.first
            continue

        def step(carry: Any, shift: Any, stage: Stage = stage) -> Any:
            moving, rows = carry
            # The next block is under way while this one is worked on.
            return (_sent(ring, moving, 1), _absorbed(ring, inputs, stage, moving, shift, rows)), None

        (moving, rows), _ = jax.lax.scan(step, (moving, rows), _shifts(stage))
        at = stage.first + stage.shifts
    if inputs.softmax_aux is not None:
        lse = jax.nn.logsumexp(inputs.softmax_aux.astype(jnp.float32), axis=-1)[:, None]
        rows = merged(rows, Rows(jnp.zeros((), jnp.float32), lse))
    return FlashAttentionOutputs(rows.out.astype(inputs.query.dtype), rows.lse)


def _absorbed(ring: Ring, inputs: FlashAttentionInputs, stage: Stage, moving: Travelling, shift: Any, rows: Rows) -> Rows:
    run = batched_forward if ring.request.policy.custom_gradients else run_forward

    def absorb(block: Block, part: FlashAttentionInputs, source: Any, rows: Rows) -> Rows:
        first = block.first_query
        found = run(ring.request_for(block, part), part)
        fresh = merged(Rows(*(x[:, first:] for x in rows)), Rows(found.out.astype(jnp.float32), found.lse))
        return Rows(
            *(x if first == 0 else jnp.concatenate([y[:, :first], x], axis=1) for x, y in zip(fresh, rows, strict=True))
        )

    return _visited(ring, inputs, stage, moving, shift, rows, absorb)


def merged(one: Rows, other: Rows) -> Rows:
    """Attention to both sets of keys. Rows that see nothing have lse -inf, and stay so."""
    largest = jnp.maximum(one.lse, other.lse)
    largest = jax.lax.stop_gradient(jnp.where(largest == -jnp.inf, 0, largest))
    weights = jnp.exp(one.lse - largest), jnp.exp(other.lse - largest)
    total = weights[0] + weights[1]
    empty = total == 0
    divisor = jnp.where(empty, 1, total)
    out = one.out * (weights[0] / divisor)[..., None] + other.out * (weights[1] / divisor)[..., None]
    return Rows(out, jnp.where(empty, -jnp.inf, largest + jnp.log(divisor)))


# Backward


def _backward(
    ring: Ring, inputs: FlashAttentionInputs, outputs: FlashAttentionOutputs, cotangents: FlashAttentionOutputs
) -> Sums:
    arrays = (inputs.query, inputs.key, inputs.value, inputs.bias)
    zeros = Sums(*(None if array is None else jnp.zeros(array.shape, jnp.float32) for array in arrays))
    sums = vary_like(zeros, (inputs, outputs, cotangents))
    moving, at, sums_at = _travelling(inputs), 0, None
    around = (inputs, outputs, cotangents)
    for stage in ring.stages:
        moving = _sent(ring, moving, stage.first - at)
        if stage.shifts == 1:
            sums = sums if sums_at is None else _sums_rotated(ring, sums, stage.first - sums_at)
            sums = _differentiated(ring, around, stage, moving, stage.first, sums)
            at = sums_at = stage.first
            continue
        sums = sums if sums_at is None else _sums_rotated(ring, sums, stage.first - 1 - sums_at)

        def step(carry: Any, shift: Any, stage: Stage = stage) -> Any:
            moving, sums = carry
            # The sums follow one step behind their keys, and travel while a block is worked on.
            arrived = _sums_rotated(ring, sums, 1)
            return (_sent(ring, moving, 1), _differentiated(ring, around, stage, moving, shift, arrived)), None

        (moving, sums), _ = jax.lax.scan(step, (moving, sums), _shifts(stage))
        at, sums_at = stage.first + stage.shifts, stage.first + stage.shifts - 1
    return _sums_rotated(ring, sums, -(sums_at or 0))


def _differentiated(ring: Ring, around: Any, stage: Stage, moving: Travelling, shift: Any, sums: Sums) -> Sums:
    """The sums and what the block at hand adds to them. Those of key and value are touched after the work, not by it: until then
    they may be under way."""
    inputs, outputs, cotangents = around

    def differentiate(block: Block, part: FlashAttentionInputs, source: Any, own: Sums) -> Sums:
        first = block.first_query
        rows = [FlashAttentionOutputs(*(None if x is None else x[:, first:] for x in y)) for y in (outputs, cotangents)]
        found = batched_backward(ring.request_for(block, part), part, *rows)
        column = source * inputs.key.shape[1]
        nothing = idle(own)
        return Sums(
            _added(own.query, found.query, (0, first, 0, 0)),
            _added(nothing.key, found.key, (0, 0, 0, 0)),
            _added(nothing.value, found.value, (0, 0, 0, 0)),
            None if own.bias is None else _added(own.bias, found.bias, (0, 0, first, column)),
        )

    def idle(own: Sums) -> Sums:
        key, value = (vary_like(jnp.zeros(array.shape, array.dtype), array) for array in (moving.key, moving.value))
        return Sums(own.query, key, value, own.bias)

    own = sums._replace(key=None, value=None)
    fresh = _visited(ring, inputs, stage, moving, shift, own, differentiate, idle)
    return fresh._replace(key=sums.key + fresh.key.astype(jnp.float32), value=sums.value + fresh.value.astype(jnp.float32))


def _sinks(ring: Ring, inputs: FlashAttentionInputs, outputs: FlashAttentionOutputs, cotangents: FlashAttentionOutputs) -> Any:
    """A sink is a logit without a value, counted once for all blocks: its d_logit is `-weight * delta`."""
    d_out = cotangents.out
    call = ring.request.call
    if Structure.of(call).positional or any(x is not None for x in (inputs.mask, inputs.bias, inputs.query_segments)):
        # The output of a row that sees no key is 0, and NaN in its cotangent must not come back.
        d_out = jnp.where(outputs.out == 0, 0, d_out)
    delta = jnp.sum(d_out.astype(jnp.float32) * outputs.out.astype(jnp.float32), axis=-1)
    delta = delta if cotangents.lse is None else delta - cotangents.lse
    weights = jnp.exp(inputs.softmax_aux[:, None].astype(jnp.float32) - outputs.lse[..., None])  # [b,t,h,n]
    parts = jnp.where(outputs.lse[..., None] == -jnp.inf, 0, -weights * delta[..., None])
    total = jnp.sum(parts, axis=1)
    return total if inputs.softmax_aux.shape[0] == total.shape[0] else jnp.sum(total, axis=0, keepdims=True)


# Both


def _visited(
    ring: Ring,
    inputs: FlashAttentionInputs,
    stage: Stage,
    moving: Travelling,
    shift: Any,
    state: Any,
    work: Callable[..., Any],
    idle: Callable[[Any], Any] = lambda state: state,
) -> Any:
    """What `work` makes of the state on the block that is here after `shift` rotations; `idle` if this device sees none of it."""
    device = jax.lax.axis_index(ring.axes)
    source = (device - shift + ring.size) % ring.size

    def visit(block: Block | None, state: Any) -> Any:
        if block is None:
            return idle(state)
        part = _part(ring, inputs, moving, block, device, source)
        seen = may_see(block.structure, part)
        if seen is None:
            return work(block, part, source, state)
        return jax.lax.cond(seen, lambda state: work(block, part, source, state), idle, state)

    if stage.behind == stage.ahead or (stage.first == 0 and stage.shifts == 1):
        return visit(stage.behind, state)
    behind, ahead = (functools.partial(visit, block) for block in (stage.behind, stage.ahead))
    return jax.lax.cond(device >= shift, behind, ahead, state)


def _part(
    ring: Ring, inputs: FlashAttentionInputs, moving: Travelling, block: Block, device: Any, source: Any
) -> FlashAttentionInputs:
    """The inputs of `flash_attention` on one block."""
    first, keys = block.first_query, block.keys
    column = source * moving.key.shape[1]
    query_positions = key_positions = None
    if block.by_position:
        query_positions, key_positions = inputs.query_positions, moving.positions
        if query_positions is None:
            indices = positions_of(ring.layout, device, ring.size, inputs.query.shape[1])
            query_positions = (indices + ring.request.call.query_offset)[None]
        if key_positions is None:
            key_positions = positions_of(ring.layout, source, ring.size, moving.key.shape[1])[None]
    return FlashAttentionInputs(
        query=inputs.query[:, first:],
        key=moving.key[:, :keys],
        value=moving.value[:, :keys],
        bias=_scores(inputs.bias, first, column, keys),
        mask=_scores(inputs.mask, first, column, keys),
        query_segments=None if inputs.query_segments is None else inputs.query_segments[:, first:],
        key_segments=None if moving.segments is None else moving.segments[:, :keys],
        query_positions=query_positions,
        key_positions=key_positions,
    )


def _scores(array: Any, first: int, column: Any, keys: int) -> Any:
    """The block of an array shaped like the scores; axes of size 1 stand for all."""
    if array is None:
        return None
    array = array if array.shape[2] == 1 else array[:, :, first:]
    return array if array.shape[3] == 1 else jax.lax.dynamic_slice_in_dim(array, column, keys, axis=3)


def _added(total: Any, part: Any, starts: tuple[Any, ...]) -> Any:
    """`total[starts : ...] += part`, in float32."""
    part = part.astype(total.dtype)
    if total.shape == part.shape:
        return total + part
    where = [start if x != y else 0 for start, x, y in zip(starts, total.shape, part.shape, strict=True)]
    where = [jnp.asarray(start, jnp.int32) for start in where]
    return jax.lax.dynamic_update_slice(total, jax.lax.dynamic_slice(total, where, part.shape) + part, where)


def _travelling(inputs: FlashAttentionInputs) -> Travelling:
    return Travelling(inputs.key, inputs.value, inputs.key_segments, inputs.key_positions)


def _shifts(stage: Stage) -> Any:
    return jnp.arange(stage.first, stage.first + stage.shifts, dtype=jnp.int32)


def _sent(ring: Ring, arrays: Any, distance: int) -> Any:
    return rotated(arrays, ring.axes, ring.size, distance)


def _sums_rotated(ring: Ring, sums: Sums, distance: int) -> Sums:
    key, value = _sent(ring, (sums.key, sums.value), distance)
    return sums._replace(key=key, value=value)
