"""`linear_recurrence` in NumPy float64: one token after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ejkernel.call.arrays import named
from ejkernel.operations.linear_recurrence.interface import (
    LinearRecurrenceCall,
    LinearRecurrenceInputs,
    LinearRecurrenceOutputs,
)
from ejkernel.operations.linear_recurrence.transposed import pulled_with_key_first, with_key_first


def _sequences(call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs) -> Iterator[tuple[int, int, list[int]]]:
    """Row of the batch, index of the sequence and its tokens in the order of the recurrence."""
    batch, length = inputs.query.shape[:2]
    for row in range(batch):
        bounds = [0, length] if inputs.cu_seqlens is None else inputs.cu_seqlens[row % len(inputs.cu_seqlens)]
        for index in range(call.sequences):
            tokens = list(range(bounds[index], bounds[index + 1]))
            yield row, index, tokens[::-1] if call.reverse else tokens


def _every_head(array: Any, axis: int, heads: int) -> Any:
    return None if array is None else np.repeat(array, heads // array.shape[axis], axis=axis)


def _expanded(call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs) -> LinearRecurrenceInputs:
    """All arrays with H heads."""
    axes = {"g_gamma": 1, "bonus": 1, "skip": 1}
    heads = call.heads[1]
    fields = ("query", "key", "value", "g", "g_gamma", "gk", "gv", "bonus", "value_scale", "skip")
    return inputs._replace(**{name: _every_head(getattr(inputs, name), axes.get(name, 2), heads) for name in fields})


def _decay(x: LinearRecurrenceInputs, row: int, t: int) -> Any:
    """What S is multiplied by before token t `[H, d, v]`."""
    total = np.zeros((x.query.shape[2], x.query.shape[3], x.value.shape[3]))
    if x.g is not None:
        total = total + x.g[row, t][:, None, None]
    if x.g_gamma is not None:
        total = total + x.g_gamma[row % len(x.g_gamma)][:, None, None]
    if x.gk is not None:
        total = total + x.gk[row, t][:, :, None]
    if x.gv is not None:
        total = total + x.gv[row, t][:, None, :]
    return np.exp(total)


def _bonus(x: LinearRecurrenceInputs, row: int) -> Any:
    return None if x.bonus is None else x.bonus[row % len(x.bonus)]


def _written(x: LinearRecurrenceInputs, row: int, t: int) -> Any:
    """The value that the state takes `[H, v]`."""
    return x.value[row, t] if x.value_scale is None else x.value_scale[row, t][:, None] * x.value[row, t]


def forward(call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs) -> LinearRecurrenceOutputs:
    if call.transposed_state:
        return with_key_first(call, inputs, forward)
    x = _expanded(call, inputs)
    batch, length, heads, width = x.query.shape
    out = np.zeros((batch, length, heads, x.value.shape[3]))
    final = np.zeros((batch, call.sequences, heads, width, x.value.shape[3]))
    for row, index, tokens in _sequences(call, inputs):
        state = final[row, index] if x.initial_state is None else x.initial_state[row, index]
        for t in tokens:
            before, outer = state, x.key[row, t][:, :, None] * _written(x, row, t)[:, None, :]
            state = _decay(x, row, t) * before + outer
            seen = state if x.bonus is None else before + _bonus(x, row)[:, :, None] * outer
            out[row, t] = call.softmax_scale * np.einsum("hd,hdv->hv", x.query[row, t], seen)
            if x.skip is not None:
                out[row, t] += x.skip[row % len(x.skip)] * x.value[row, t]
        final[row, index] = state
    return LinearRecurrenceOutputs(out, final if call.return_state else None)


def backward(
    call: LinearRecurrenceCall,
    inputs: LinearRecurrenceInputs,
    outputs: LinearRecurrenceOutputs,
    cotangents: LinearRecurrenceOutputs,
) -> LinearRecurrenceInputs:
    if call.transposed_state:
        return pulled_with_key_first(
            call, inputs, cotangents, lambda call, inputs, cotangents: backward(call, inputs, outputs, cotangents)
        )
    x = _expanded(call, inputs)
    grads = {name: np.zeros(array.shape) for name, array in named(x) if name != "cu_seqlens"}
    for row, index, tokens in _sequences(call, inputs):
        states = [np.zeros(_state_shape(x)) if x.initial_state is None else x.initial_state[row, index]]
        for t in tokens:
            states.append(_decay(x, row, t) * states[-1] + x.key[row, t][:, :, None] * _written(x, row, t)[:, None, :])
        d_state = np.zeros(_state_shape(x)) if cotangents.final_state is None else cotangents.final_state[row, index]
        for step in reversed(range(len(tokens))):
            d_state = _pull_token(call, x, grads, cotangents.out, row, tokens[step], states[step], states[step + 1], d_state)
        if x.initial_state is not None:
            grads["initial_state"][row, index] = d_state
    return LinearRecurrenceInputs(**{name: _shared(name, grad, getattr(inputs, name)) for name, grad in grads.items()})


def _state_shape(x: LinearRecurrenceInputs) -> tuple[int, int, int]:
    """Shape of one state."""
    return x.query.shape[2], x.query.shape[3], x.value.shape[3]


def _pull_token(call: Any, x: Any, grads: Any, d_out: Any, row: int, t: int, before: Any, after: Any, d_state: Any) -> Any:
    """Add the gradients of one token; from the gradient of the state after it, that of the state before it."""
    q, k, v, d_o = x.query[row, t], x.key[row, t], _written(x, row, t), call.softmax_scale * d_out[row, t]
    d_seen = q[:, :, None] * d_o[:, None, :]
    d_before, d_outer = np.zeros_like(d_seen), np.zeros_like(d_seen)
    if x.bonus is None:
        grads["query"][row, t] = np.einsum("hdv,hv->hd", after, d_o)
        d_state = d_state + d_seen
    else:
        u, outer = _bonus(x, row), k[:, :, None] * v[:, None, :]
        grads["query"][row, t] = np.einsum("hdv,hv->hd", before + u[:, :, None] * outer, d_o)
        grads["bonus"][row % len(x.bonus)] += (d_seen * outer).sum(axis=2)
        d_before, d_outer = d_seen, u[:, :, None] * d_seen
    d_outer = d_outer + d_state
    grads["key"][row, t] = np.einsum("hdv,hv->hd", d_outer, v)
    d_value = np.einsum("hdv,hd->hv", d_outer, k)
    if x.value_scale is not None:
        grads["value_scale"][row, t] = (d_value * x.value[row, t]).sum(axis=1)
        d_value = x.value_scale[row, t][:, None] * d_value
    if x.skip is not None:
        skipped = d_out[row, t] * x.value[row, t]
        grads["skip"][row % len(x.skip)] += skipped if x.skip.shape[2] == skipped.shape[1] else skipped.sum(1, keepdims=True)
        d_value = d_value + x.skip[row % len(x.skip)] * d_out[row, t]
    grads["value"][row, t] = d_value
    decay = _decay(x, row, t)
    d_log = d_state * decay * before
    if x.g is not None:
        grads["g"][row, t] = d_log.sum(axis=(1, 2))
    if x.g_gamma is not None:
        grads["g_gamma"][row % len(x.g_gamma)] += d_log.sum(axis=(1, 2))
    if x.gk is not None:
        grads["gk"][row, t] = d_log.sum(axis=2)
    if x.gv is not None:
        grads["gv"][row, t] = d_log.sum(axis=1)
    return d_before + decay * d_state


def _shared(name: str, grad: Any, like: Any) -> Any:
    """The gradient of all H heads summed over the heads that share one."""
    axis = 1 if name in ("g_gamma", "bonus", "skip") else 2
    if name == "initial_state" or grad.shape == like.shape:
        return grad
    kept = like.shape[axis]
    shape = (*grad.shape[:axis], kept, grad.shape[axis] // kept, *grad.shape[axis + 1 :])
    return grad.reshape(shape).sum(axis=axis + 1)
