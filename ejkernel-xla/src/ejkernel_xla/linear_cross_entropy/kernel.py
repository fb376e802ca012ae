"""Both phases. A forward that is differentiated takes some rows at a time, with all of their logits, and forms the gradients of
the total beside it: three products with the head, where gradients that start from lse want four."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.operations.cross_entropy.interface import IGNORED
from ejkernel.operations.linear_cross_entropy.interface import (
    LinearCrossEntropyCall,
    LinearCrossEntropyInputs,
    LinearCrossEntropyOutputs,
    per_row_inputs,
    row_cotangents,
)
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.utils.dtypes import accumulator
from ejkernel_xla import cross_entropy
from ejkernel_xla._vocabulary import Head, Tiles, VocabularyConfig, merged_rows, over_rows, row_steps, zero_head
from ejkernel_xla.cross_entropy.kernel import capped, logits_gradient, shift_of

_CPU_TILE, _TILE = 2**23, 2**28
"""Logits of one tile."""


def heuristic(call: LinearCrossEntropyCall, target: Target) -> VocabularyConfig:
    """Tiles larger than `cross_entropy`'s: a step that forms gradients takes as many rows as have one tile's logits in all."""
    if target.backend == "cpu":
        return VocabularyConfig(1024, _CPU_TILE // 1024)
    return VocabularyConfig(16384, _TILE // 16384)


def search_space(call: LinearCrossEntropyCall, target: Target) -> tuple[VocabularyConfig, ...]:
    first = heuristic(call, target)
    rows, columns = first.block_rows, first.block_vocabulary
    return (
        first,
        VocabularyConfig(rows, columns // 4),
        VocabularyConfig(rows, columns // 2),
        VocabularyConfig(rows, 2 * columns),
    )


CONFIGS = ConfigSpace(VocabularyConfig, heuristic, search_space)


class _Rows(NamedTuple):
    """Arrays `[b, n]` that go along with x. Rows that are added to fill the last step hold 0, which must mean ignored."""

    target_after_ignored: Any
    weights: Any


class _Results(NamedTuple):
    loss: Any
    penalty: Any
    d_x: Any


def forward(
    call: LinearCrossEntropyCall, inputs: LinearCrossEntropyInputs, config: VocabularyConfig
) -> LinearCrossEntropyOutputs:
    if call.save_residuals:
        return _forward_with_gradients(call, inputs, config)
    loss, lse, logit_sum = cross_entropy.forward(call.per_row, per_row_inputs(inputs), config)
    if call.label_smoothing:
        s = call.label_smoothing
        loss = (1 - s) * loss + s * (lse - logit_sum / call.vocabulary)
    penalty = call.z_loss * lse * lse
    weights = _weights(inputs, lse)
    return LinearCrossEntropyOutputs(*_total(call, (loss + penalty) * weights, jax.lax.stop_gradient(penalty) * weights))


def _weights(inputs: LinearCrossEntropyInputs, lse: Any) -> Any:
    """Of rows, 0 where they are ignored."""
    weights = jnp.ones((), lse.dtype) if inputs.weights is None else inputs.weights
    return jax.lax.stop_gradient(jnp.where(inputs.targets == IGNORED, jnp.zeros((), lse.dtype), weights))


def _total(call: LinearCrossEntropyCall, loss: Any, penalty: Any) -> tuple[Any, Any]:
    axes = tuple(range(1, loss.ndim))
    return jnp.sum(loss, axes), jnp.sum(penalty, axes) if call.z_loss else None


def _forward_with_gradients(
    call: LinearCrossEntropyCall, inputs: LinearCrossEntropyInputs, config: VocabularyConfig
) -> LinearCrossEntropyOutputs:
    tiles = Tiles.of(call.vocabulary, call.vocabulary, call.transpose_head, call.precision, inputs.head)
    head = Head(inputs.head, inputs.head_bias)
    x = merged_rows(inputs.x, 1)
    targets = merged_rows(inputs.targets, 0)
    weights = _weights(inputs, jnp.zeros((), accumulator(inputs.x.dtype)))
    rows = _Rows(targets - IGNORED, merged_rows(weights, 0))
    block = max(config.block_rows * config.block_vocabulary // call.vocabulary, 1)
    steps = row_steps(call.x.shape[0], targets.shape[1], block)

    def work(sums: Head, arrays: tuple[Any, _Rows]) -> tuple[Head, _Results]:
        return _gradients(call, tiles, head, sums, *arrays)

    of_each = Head(*(None if array is None else _of_each(array, call.x.shape[0]) for array in head))
    sums, found = over_rows(work, zero_head(of_each, steps > 1, inputs), (x, rows), steps)
    return LinearCrossEntropyOutputs(
        *_total(call, found.loss, found.penalty),
        found.d_x.reshape(inputs.x.shape),
        sums.matrix.astype(inputs.head.dtype),
        None if inputs.head_bias is None else sums.bias.astype(inputs.head_bias.dtype),
    )


def _of_each(array: Any, batch: int) -> Any:
    return jnp.broadcast_to(array, (batch, *array.shape[1:]))


def _gradients(
    call: LinearCrossEntropyCall, tiles: Tiles, head: Head, sums: Head, x: Any, rows: _Rows
) -> tuple[Head, _Results]:
    """The head's gradient with these rows' contribution; and what belongs to the rows."""
    targets = rows.target_after_ignored + IGNORED
    valid = targets != IGNORED
    x = jnp.where(valid[..., None], x, jnp.zeros((), x.dtype))
    logits, slope = capped(call.logit_softcap, tiles.logits(x, head, (0, 0)))
    shift = shift_of(jnp.max(logits, axis=-1))
    lse = shift + jnp.log(jnp.sum(jnp.exp(logits - shift[..., None]), axis=-1))
    here = (targets >= 0) & (targets < tiles.size)
    found = jnp.take_along_axis(logits, jnp.clip(targets, 0, tiles.size - 1)[..., None], axis=-1)[..., 0]
    s = call.label_smoothing
    loss = lse - (1 - s) * jnp.where(here, found, 0)
    if s:
        loss = loss - s * jnp.mean(logits, axis=-1)
    penalty = call.z_loss * lse * lse
    none = jnp.zeros((), lse.dtype)
    given = (none if value is None else value[..., None] for value in row_cotangents(call, lse, rows.weights))
    wanted = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == targets[..., None]
    d_logits = logits_gradient(logits, slope, lse[..., None], wanted, valid[..., None], *given)
    sums = tiles.add_to_head(sums, x, d_logits, (0, 0))
    d_x = tiles.d_rows(d_logits, head, (0, 0)).astype(x.dtype)
    loss, penalty = (jnp.where(valid, value * rows.weights, 0) for value in (loss + penalty, penalty))
    return sums, _Results(loss, penalty, d_x)


def backward(
    call: LinearCrossEntropyCall,
    inputs: LinearCrossEntropyInputs,
    outputs: LinearCrossEntropyOutputs,
    cotangents: LinearCrossEntropyOutputs,
    config: VocabularyConfig,
) -> LinearCrossEntropyInputs:
    def scaled(gradient: Any, array: Any) -> Any:
        if gradient is None:
            return None
        factors = cotangents.total.reshape(-1, *[1] * (gradient.ndim - 1))
        found = gradient.astype(accumulator(gradient.dtype)) * factors
        return (jnp.sum(found, axis=0, keepdims=True) if array.shape[0] == 1 else found).astype(gradient.dtype)

    return LinearCrossEntropyInputs(
        scaled(outputs.d_x, inputs.x),
        None,
        scaled(outputs.d_head, inputs.head),
        scaled(outputs.d_head_bias, inputs.head_bias),
    )
