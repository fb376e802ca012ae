"""`kl_divergence` in NumPy float64."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ejkernel.operations.kl_divergence.interface import KlDivergenceCall, KlDivergenceInputs, KlDivergenceOutputs


class _Side(NamedTuple):
    """hidden (or logits) `[b, n, d]`, head `[b?, d, v]` or None, lse `[b, n, 1]`, log-probabilities and probabilities."""

    x: Any
    head: Any
    lse: Any
    log: Any
    p: Any


def _side(call: KlDivergenceCall, x: Any, head: Any, valid: Any) -> _Side:
    x = np.where(valid, x.reshape(*valid.shape[:2], x.shape[-1]), 0)
    if head is not None and call.transpose_heads:
        head = np.swapaxes(head, 1, 2)
    logits = (x if head is None else x @ head) / call.temperature
    largest = logits.max(-1, keepdims=True)
    lse = largest + np.log(np.exp(logits - largest).sum(-1, keepdims=True))
    return _Side(x, head, lse, logits - lse, np.exp(logits - lse))


def _valid(call: KlDivergenceCall, inputs: KlDivergenceInputs) -> Any:
    shape = (call.student.shape[0], math.prod(call.student.shape[1:-1]), 1)
    return np.ones(shape, bool) if inputs.valid is None else inputs.valid.reshape(shape)


def _weighted(p: Any, log: Any, other: Any) -> Any:
    """`p (log - other)`, 0 where p is."""
    return np.where(p == 0, 0, p * np.where(p == 0, 0, log - other))


def _terms(call: KlDivergenceCall, s: _Side, t: _Side) -> tuple[Any, Any]:
    """The terms of the loss, and their derivatives by the student's log-probabilities."""
    if call.direction == "forward":
        return _weighted(t.p, t.log, s.log), -t.p
    if call.direction == "reverse":
        term = _weighted(s.p, s.log, t.log)
        return term, term + s.p
    beta = call.beta or 0.0
    mixed = np.log(beta * t.p + (1 - beta) * s.p)
    own = (1 - beta) * _weighted(s.p, s.log, mixed)
    return beta * _weighted(t.p, t.log, mixed) + own, own


def forward(call: KlDivergenceCall, inputs: KlDivergenceInputs) -> KlDivergenceOutputs:
    valid = _valid(call, inputs)
    s = _side(call, inputs.student, inputs.student_head, valid)
    t = _side(call, inputs.teacher, inputs.teacher_head, valid)
    term, slope = _terms(call, s, t)
    found = (term.sum(-1, keepdims=True), s.lse, t.lse, slope.sum(-1, keepdims=True))
    return KlDivergenceOutputs(*(np.where(valid, value, 0).reshape(inputs.student.shape[:-1]) for value in found))


def backward(
    call: KlDivergenceCall, inputs: KlDivergenceInputs, outputs: KlDivergenceOutputs, cotangents: KlDivergenceOutputs
) -> KlDivergenceInputs:
    valid = _valid(call, inputs)
    s = _side(call, inputs.student, inputs.student_head, valid)
    t = _side(call, inputs.teacher, inputs.teacher_head, valid)
    _, slope = _terms(call, s, t)
    grad = np.where(valid, cotangents.loss.reshape(valid.shape), 0)
    d_logits = grad * (slope - s.p * slope.sum(-1, keepdims=True)) / call.temperature
    d_student = d_logits if s.head is None else d_logits @ np.swapaxes(s.head, 1, 2)
    d_head = None
    if s.head is not None:
        d_head = np.swapaxes(s.x, 1, 2) @ d_logits
        d_head = np.swapaxes(d_head, 1, 2) if call.transpose_heads else d_head
        d_head = d_head.sum(0, keepdims=True) if inputs.student_head.shape[0] == 1 else d_head
    return KlDivergenceInputs(d_student.reshape(inputs.student.shape), None, d_head)
