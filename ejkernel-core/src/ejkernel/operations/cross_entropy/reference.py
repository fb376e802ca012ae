"""`cross_entropy` in NumPy float64."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ejkernel.operations.cross_entropy.interface import IGNORED, CrossEntropyCall, CrossEntropyInputs, CrossEntropyOutputs


class _Rows(NamedTuple):
    x: Any
    head: Any
    logits: Any
    slope: Any
    valid: Any
    lse: Any
    onehot: Any


def _rows(call: CrossEntropyCall, inputs: CrossEntropyInputs) -> _Rows:
    batch = call.x.shape[0]
    targets = inputs.targets.reshape(batch, math.prod(call.targets.shape[1:]))
    valid = (targets != IGNORED)[..., None]
    x = np.where(valid, inputs.x.reshape(*targets.shape, call.x.shape[-1]), 0)
    head = inputs.head
    if head is not None and call.transpose_head:
        head = np.swapaxes(head, 1, 2)
    logits = x if head is None else x @ head
    if inputs.head_bias is not None:
        logits = logits + inputs.head_bias[:, None]
    slope = np.ones_like(logits)
    if call.logit_softcap is not None:
        capped = np.tanh(logits / call.logit_softcap)
        logits, slope = np.where(np.isneginf(logits), -np.inf, call.logit_softcap * capped), 1 - capped**2
    largest = logits.max(-1, keepdims=True)
    lse = largest + np.log(np.exp(logits - largest).sum(-1, keepdims=True))
    onehot = np.arange(call.vocabulary) == targets[..., None]
    return _Rows(x, head, logits, slope, valid, lse, onehot)


def forward(call: CrossEntropyCall, inputs: CrossEntropyInputs) -> CrossEntropyOutputs:
    r = _rows(call, inputs)
    loss = r.lse - np.where(r.onehot, r.logits, 0).sum(-1, keepdims=True)
    outputs = (loss, r.lse, r.logits.sum(-1, keepdims=True))
    shaped = [np.where(r.valid, value, 0).reshape(inputs.targets.shape) for value in outputs]
    return CrossEntropyOutputs(shaped[0], shaped[1], shaped[2] if call.sum_logits else None)


def backward(
    call: CrossEntropyCall, inputs: CrossEntropyInputs, outputs: CrossEntropyOutputs, cotangents: CrossEntropyOutputs
) -> CrossEntropyInputs:
    r = _rows(call, inputs)
    d_loss, d_lse, d_sum = (0 if c is None else c.reshape(r.lse.shape) for c in cotangents)
    d_logits = np.exp(r.logits - r.lse) * (d_loss + d_lse) - r.onehot * d_loss + d_sum
    d_logits = np.where(r.valid, d_logits * r.slope, 0)
    if r.head is None:
        return CrossEntropyInputs(d_logits.reshape(inputs.x.shape), None)
    d_head = np.swapaxes(r.x, 1, 2) @ d_logits
    d_head = np.swapaxes(d_head, 1, 2) if call.transpose_head else d_head
    d_bias = d_logits.sum(1)
    if inputs.head.shape[0] == 1:
        d_head = d_head.sum(0, keepdims=True)
    if inputs.head_bias is not None and inputs.head_bias.shape[0] == 1:
        d_bias = d_bias.sum(0, keepdims=True)
    d_x = d_logits @ np.swapaxes(r.head, 1, 2)
    return CrossEntropyInputs(d_x.reshape(inputs.x.shape), None, d_head, None if inputs.head_bias is None else d_bias)
