"""Two sweeps over the vocabulary: the log-sum-exps of both sides, then the terms of the loss or their gradients."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.call import vary_like
from ejkernel.operations.kl_divergence.interface import KlDivergenceCall, KlDivergenceInputs, KlDivergenceOutputs
from ejkernel.utils.dtypes import accumulator
from ejkernel_xla._vocabulary import Head, Tiles, VocabularyConfig, added, merged_rows, over_rows, row_steps, zero_head


class Pair(NamedTuple):
    """A value of the student and of the teacher."""

    student: Any
    teacher: Any


class Terms(NamedTuple):
    """Per entry of the vocabulary: the loss's term, and its derivative by the student's log-probability."""

    loss: Any
    slope: Any


def _plan(call: KlDivergenceCall, config: VocabularyConfig) -> tuple[Tiles, int]:
    """The tiles, and the number of steps over rows."""
    heads = call.student_head or call.teacher_head
    tiles = Tiles.of(call.vocabulary, config.block_vocabulary, call.transpose_heads, call.precision, heads)
    rows = math.prod(call.student.shape[1:-1])
    return tiles, 1 if heads is None else row_steps(call.student.shape[0], rows, config.block_rows)


def forward(call: KlDivergenceCall, inputs: KlDivergenceInputs, config: VocabularyConfig) -> KlDivergenceOutputs:
    tiles, steps = _plan(call, config)
    heads = Pair(Head(inputs.student_head), Head(inputs.teacher_head))

    def work(_: None, arrays: Any) -> tuple[None, KlDivergenceOutputs]:
        return None, _rows(call, tiles, heads, *arrays)

    _, found = over_rows(work, None, _arrays(inputs), steps)
    found = KlDivergenceOutputs(*(value.reshape(inputs.student.shape[:-1]) for value in found))
    return found if call.save_residuals else KlDivergenceOutputs(found.loss)


def _arrays(inputs: KlDivergenceInputs) -> tuple[Pair, Any]:
    valid = None if inputs.valid is None else merged_rows(inputs.valid, 0)
    return Pair(merged_rows(inputs.student, 1), merged_rows(inputs.teacher, 1)), valid


def _rows(call: KlDivergenceCall, tiles: Tiles, heads: Pair, x: Pair, valid: Any) -> KlDivergenceOutputs:
    x = _clean(x, valid)
    zeros = vary_like(jnp.zeros(x.student.shape[:2], accumulator(x.student.dtype)), (x, heads, valid))
    lse = Pair(*(_log_sum(call, tiles, head, one, zeros) for head, one in zip(heads, x, strict=True)))

    def update(sums: Terms, tile: Any) -> Terms:
        terms, _ = _terms(call, tiles, heads, x, lse, tile)
        return Terms(*(total + jnp.sum(part, axis=-1) for total, part in zip(sums, terms, strict=True)))

    sums = tiles.fold(update, Terms(zeros, zeros))
    found = KlDivergenceOutputs(sums.loss, lse.student, lse.teacher, sums.slope)
    return found if valid is None else KlDivergenceOutputs(*(jnp.where(valid, value, 0) for value in found))


def _clean(x: Pair, valid: Any) -> Pair:
    return x if valid is None else Pair(*(jnp.where(valid[..., None], one, jnp.zeros((), one.dtype)) for one in x))


def _scaled(call: KlDivergenceCall, tiles: Tiles, head: Head, x: Any, tile: Any) -> Any:
    """Logits of one tile over the temperature; -inf for entries that are another tile's."""
    logits = tiles.logits(x, head, tile) / call.temperature
    _, own = tiles.columns(tile)
    return logits if own is None else jnp.where(own, logits, -jnp.inf)


def _log_sum(call: KlDivergenceCall, tiles: Tiles, head: Head, x: Any, zeros: Any) -> Any:
    def update(state: tuple[Any, Any], tile: Any) -> tuple[Any, Any]:
        logits = _scaled(call, tiles, head, x, tile).astype(zeros.dtype)
        # Any constant may be subtracted, so the maximum needs no derivative.
        largest = jnp.maximum(state[0], jax.lax.stop_gradient(jnp.max(logits, axis=-1)))
        shift = jnp.where(largest == -jnp.inf, 0, largest)
        return largest, state[1] * jnp.exp(state[0] - shift) + jnp.sum(jnp.exp(logits - shift[..., None]), axis=-1)

    largest, total = tiles.fold(update, (zeros - jnp.inf, zeros))
    return jnp.log(total) + jnp.where(largest == -jnp.inf, 0, largest)


def _terms(call: KlDivergenceCall, tiles: Tiles, heads: Pair, x: Pair, lse: Pair, tile: Any) -> tuple[Terms, Any]:
    """The terms of one tile, and the student's probabilities."""
    sides = zip(heads, x, lse, strict=True)
    logs = Pair(*(_scaled(call, tiles, head, one, tile) - total[..., None] for head, one, total in sides))
    p = Pair(*(jnp.exp(one) for one in logs))
    if call.direction == "forward":
        return Terms(_weighted(p.teacher, logs.teacher, logs.student), -p.teacher), p.student
    if call.direction == "reverse":
        loss = _weighted(p.student, logs.student, logs.teacher)
        return Terms(loss, loss + p.student), p.student
    beta = call.beta or 0.0
    mixed = _log(beta * p.teacher + (1 - beta) * p.student)
    own = (1 - beta) * _weighted(p.student, logs.student, mixed)
    return Terms(beta * _weighted(p.teacher, logs.teacher, mixed) + own, own), p.student


def _weighted(p: Any, log: Any, other: Any) -> Any:
    """`p (log - other)`, 0 where p is; finite derivatives there."""
    some = p > 0
    return p * (jnp.where(some, log, 0) - jnp.where(some, other, 0)) if p.size else p


def _log(p: Any) -> Any:
    return jnp.log(jnp.where(p > 0, p, 1))


def backward(
    call: KlDivergenceCall,
    inputs: KlDivergenceInputs,
    outputs: KlDivergenceOutputs,
    cotangents: KlDivergenceOutputs,
    config: VocabularyConfig,
) -> KlDivergenceInputs:
    tiles, steps = _plan(call, config)
    heads = Pair(Head(inputs.student_head), Head(inputs.teacher_head))
    saved = tuple(merged_rows(x, 0) for x in (outputs.student_lse, outputs.teacher_lse, outputs.slope, cotangents.loss))

    def work(sums: Head, arrays: Any) -> tuple[Head, Any]:
        return _gradients(call, tiles, heads, sums, *arrays)

    sums = zero_head(heads.student, steps > 1, (inputs, outputs, cotangents))
    sums, d_student = over_rows(work, sums, (*_arrays(inputs), saved), steps)
    return KlDivergenceInputs(
        student=d_student.reshape(inputs.student.shape),
        teacher=None,
        student_head=None if sums.matrix is None else sums.matrix.astype(inputs.student_head.dtype),
    )


def _gradients(
    call: KlDivergenceCall, tiles: Tiles, heads: Pair, sums: Head, x: Pair, valid: Any, saved: tuple[Any, ...]
) -> tuple[Head, Any]:
    """The head's gradient with these rows' contribution, and the gradient of the student's rows."""
    x = _clean(x, valid)
    student_lse, teacher_lse, slope, d_loss = saved
    scale = (d_loss if valid is None else jnp.where(valid, d_loss, 0))[..., None] / call.temperature
    lse = Pair(student_lse, teacher_lse)

    def add(state: tuple[Head, Any], tile: Any) -> tuple[Head, Any]:
        sums, d_student = state
        terms, p = _terms(call, tiles, heads, x, lse, tile)
        d_logits = scale * (terms.slope - p * slope[..., None])
        if heads.student.matrix is None:
            return sums, added(d_student, d_logits, tile[0], 2)
        d_student = d_student + tiles.d_rows(d_logits, heads.student, tile).astype(d_student.dtype)
        return tiles.add_to_head(sums, x.student, d_logits, tile), d_student

    # Without a head of its own every entry of the student's gradient is written by one tile, so it needs no wider sums.
    dtype = x.student.dtype if heads.student.matrix is None else accumulator(x.student.dtype)
    start = vary_like(jnp.zeros(x.student.shape, dtype), (x, heads, saved, sums))
    sums, d_student = tiles.fold(add, (sums, start))
    return sums, d_student.astype(x.student.dtype)
