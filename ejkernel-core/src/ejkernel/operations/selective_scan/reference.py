"""`selective_scan` in NumPy float64: one token after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from ejkernel.call.arrays import named
from ejkernel.operations.selective_scan.interface import SelectiveScanCall, SelectiveScanInputs, SelectiveScanOutputs


def _states(inputs: SelectiveScanInputs) -> list[Any]:
    """The state before every token, and the last one `[b, i, n]`."""
    x, A, B, _, _, dt, initial = inputs
    states = [np.zeros((x.shape[0], *A.shape[1:])) if initial is None else initial]
    for t in range(x.shape[1]):
        states.append(np.exp(A * dt[:, t, :, None]) * states[-1] + (dt[:, t] * x[:, t])[:, :, None] * B[:, t, None, :])
    return states


def forward(call: SelectiveScanCall, inputs: SelectiveScanInputs) -> SelectiveScanOutputs:
    states = _states(inputs)
    out = np.zeros(inputs.x.shape)
    for t, state in enumerate(states[1:]):
        out[:, t] = (state * inputs.C[:, t, None, :]).sum(axis=2)
    if inputs.D is not None:
        out = out + inputs.D[:, None, :] * inputs.x
    return SelectiveScanOutputs(out, states[-1])


def backward(
    call: SelectiveScanCall, inputs: SelectiveScanInputs, outputs: SelectiveScanOutputs, cotangents: SelectiveScanOutputs
) -> SelectiveScanInputs:
    x, A, B, C, D, dt, initial = inputs
    grads = {name: np.zeros((x.shape[0], *array.shape[1:])) for name, array in named(inputs)}
    states, d_state = _states(inputs), cotangents.final_state
    if D is not None:
        grads["x"] += D[:, None, :] * cotangents.out
        grads["D"] += (x * cotangents.out).sum(axis=1)
    for t in reversed(range(x.shape[1])):
        before, after = states[t], states[t + 1]
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
        d_state = d_state * decay
    if initial is not None:
        grads["initial_state"] = d_state
    return SelectiveScanInputs(
        **{
            name: grad.sum(axis=0, keepdims=True) if getattr(inputs, name).shape[0] == 1 else grad
            for name, grad in grads.items()
        }
    )
