"""`selective_scan` in NumPy float64: one token after the other, and one packed sequence after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ejkernel.call.arrays import named
from ejkernel.operations.selective_scan.interface import SelectiveScanCall, SelectiveScanInputs, SelectiveScanOutputs


def _lowest(A: Any) -> Any:
    """A with the lowest finite number for -inf: a token with dt = 0 leaves the state as it is."""
    return np.maximum(A, np.finfo(np.float64).min)


def _states(inputs: SelectiveScanInputs) -> list[Any]:
    """The first state, and that after every token `[b, i, n]`."""
    x, A, B, _, _, dt, initial, _, _ = inputs._replace(A=_lowest(inputs.A))
    states = [np.zeros((x.shape[0], *A.shape[1:])) if initial is None else initial]
    for t in range(x.shape[1]):
        written = (dt[:, t] * x[:, t])[:, :, None] * B[:, t, None, :]
        states.append(np.exp(A * dt[:, t, :, None]) * _unless_reset(inputs, t, states[-1]) + written)
    return states


def _unless_reset(inputs: SelectiveScanInputs, t: int, state: Any) -> Any:
    """The state, or its gradient, before token t."""
    return state if inputs.resets is None else np.where(inputs.resets[:, t, None, None], 0, state)


def forward(call: SelectiveScanCall, inputs: SelectiveScanInputs) -> SelectiveScanOutputs:
    if inputs.cu_seqlens is not None:
        out, last = np.zeros(inputs.x.shape), np.zeros(call.state_shape)
        for row, sequence, tokens in _sequences(call, inputs):
            found = forward(call, _one(inputs, row, sequence, tokens))
            out[row, tokens], last[row, sequence] = found.out[0], found.final_state[0]
        return SelectiveScanOutputs(out, last)
    states = _states(inputs)
    out = np.zeros(inputs.x.shape)
    for t, state in enumerate(states[1:]):
        out[:, t] = (state * inputs.C[:, t, None, :]).sum(axis=2)
    if inputs.D is not None:
        out = out + inputs.D[:, None, :] * inputs.x
    return SelectiveScanOutputs(out, states[-1])


def _sequences(call: SelectiveScanCall, inputs: SelectiveScanInputs) -> Iterator[tuple[int, int, slice]]:
    """Row of the batch, number and tokens of every packed sequence."""
    for row in range(call.x.shape[0]):
        bounds = inputs.cu_seqlens[min(row, inputs.cu_seqlens.shape[0] - 1)]
        for sequence, (start, end) in enumerate(itertools.pairwise(bounds)):
            yield row, sequence, slice(start, end)


def _one(inputs: SelectiveScanInputs, row: int, sequence: int, tokens: slice) -> SelectiveScanInputs:
    """The inputs of one packed sequence, as a batch of one row."""
    rows = {name: array[min(row, array.shape[0] - 1)][None] for name, array in named(inputs) if name != "cu_seqlens"}
    for name in ("x", "B", "C", "dt"):
        rows[name] = rows[name][:, tokens]
    if "initial_state" in rows:
        rows["initial_state"] = rows["initial_state"][:, sequence]
    return SelectiveScanInputs(**rows)


def backward(
    call: SelectiveScanCall, inputs: SelectiveScanInputs, outputs: SelectiveScanOutputs, cotangents: SelectiveScanOutputs
) -> SelectiveScanInputs:
    if inputs.cu_seqlens is not None:
        return _packed_backward(call, inputs, cotangents)
    x, A, B, C, D, dt, initial, _, _ = inputs._replace(A=_lowest(inputs.A))
    moving = [(name, array) for name, array in named(inputs) if name != "resets"]
    grads = {name: np.zeros((x.shape[0], *array.shape[1:])) for name, array in moving}
    states, d_state = _states(inputs), cotangents.final_state
    if D is not None:
        grads["x"] += D[:, None, :] * cotangents.out
        grads["D"] += (x * cotangents.out).sum(axis=1)
    for t in reversed(range(x.shape[1])):
        before, after = _unless_reset(inputs, t, states[t]), states[t + 1]
        d_out = cotangents.out[:, t, :, None]
        d_state = d_state + d_out * C[:, t, None, :]
        grads["C"][:, t] = (d_out * after).sum(axis=1)
        written = dt[:, t] * x[:, t]
        grads["B"][:, t] = (d_state * written[:, :, None]).sum(axis=1)
        d_written = (d_state * B[:, t, None, :]).sum(axis=2)
        decay = np.exp(A * dt[:, t, :, None])
        d_exponent = d_state * before * decay
        grads["A"] += d_exponent * dt[:, t, :, None]
        grads["dt"][:, t] = d_written * x[:, t] + (d_exponent * A).sum(axis=2)
        grads["x"][:, t] += d_written * dt[:, t]
        d_state = _unless_reset(inputs, t, d_state * decay)
    if initial is not None:
        grads["initial_state"] = d_state
    return SelectiveScanInputs(
        **{
            name: grad.sum(axis=0, keepdims=True) if getattr(inputs, name).shape[0] == 1 else grad
            for name, grad in grads.items()
        }
    )


def _packed_backward(
    call: SelectiveScanCall, inputs: SelectiveScanInputs, cotangents: SelectiveScanOutputs
) -> SelectiveScanInputs:
    grads = {name: np.zeros(array.shape) for name, array in named(inputs) if name != "cu_seqlens"}
    for row, sequence, tokens in _sequences(call, inputs):
        wanted = SelectiveScanOutputs(cotangents.out[row, tokens][None], cotangents.final_state[row, sequence][None])
        found = backward(call, _one(inputs, row, sequence, tokens), wanted, wanted)
        for name, grad in named(found):
            at = min(row, grads[name].shape[0] - 1)
            place = (at, tokens) if name in ("x", "B", "C", "dt") else (at, sequence) if name == "initial_state" else (at,)
            grads[name][place] += grad[0]
    return SelectiveScanInputs(**grads)
