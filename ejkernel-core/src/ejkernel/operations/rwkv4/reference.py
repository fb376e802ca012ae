"""`rwkv4` in NumPy float64: one token after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from ejkernel.call.arrays import named
from ejkernel.operations.rwkv4.interface import NOTHING_SEEN, Rwkv4Call, Rwkv4Inputs, Rwkv4Outputs


def _first(inputs: Rwkv4Inputs) -> Any:
    """Numerator, denominator, exponent before the first token, each `[b, c]`."""
    if inputs.state is not None:
        return tuple(np.moveaxis(inputs.state, 1, 0))
    shape = (inputs.k.shape[0], inputs.k.shape[2])
    return np.zeros(shape), np.zeros(shape), np.full(shape, NOTHING_SEEN)


def _read(state: Any, logit: Any, v: Any) -> tuple[Any, Any, Any]:
    """Output, denominator, and the weights of the state and of the token in it."""
    a, b, p = state
    top = np.maximum(p, logit)
    old, new = np.exp(p - top), np.exp(logit - top)
    total = old * b + new
    return (old * a + new * v) / total, old / total, new / total


def _write(state: Any, log_decay: Any, k: Any, v: Any) -> Any:
    a, b, p = state
    top = np.maximum(p + log_decay, k)
    old, new = np.exp(p + log_decay - top), np.exp(k - top)
    return old * a + new * v, old * b + new, top


def _log_decay(w: Any) -> Any:
    """Its gradient is 0, not NaN, where it is -inf."""
    return -np.exp(np.minimum(w, 700))


def forward(call: Rwkv4Call, inputs: Rwkv4Inputs) -> Rwkv4Outputs:
    w, u, k, v, _ = inputs
    state, out = _first(inputs), np.zeros(v.shape)
    for t in range(k.shape[1]):
        out[:, t] = _read(state, u + k[:, t], v[:, t])[0]
        state = _write(state, _log_decay(w), k[:, t], v[:, t])
    return Rwkv4Outputs(out, np.stack(state, axis=1) if call.return_state else None)


def backward(call: Rwkv4Call, inputs: Rwkv4Inputs, outputs: Rwkv4Outputs, cotangents: Rwkv4Outputs) -> Rwkv4Inputs:
    w, u, k, v, _ = inputs
    batch, length, channels = k.shape
    log_decay = _log_decay(w)
    states = [_first(inputs)]
    for t in range(length):
        states.append(_write(states[-1], log_decay, k[:, t], v[:, t]))
    d_k, d_v, d_u, d_decay = (np.zeros(shape) for shape in (k.shape, v.shape, (batch, channels), (batch, channels)))
    final = cotangents.final_state
    d_a, d_b, d_p = np.zeros((3, batch, channels)) if final is None else np.moveaxis(final, 1, 0)
    for t in reversed(range(length)):
        a, b, p = states[t]
        # the state after the token: a' = old a + new v, b' = old b + new, p' = the larger exponent
        first = p + log_decay >= k[:, t]
        top = states[t + 1][2]
        old, new = np.exp(p + log_decay - top), np.exp(k[:, t] - top)
        d_old, d_new = old * (d_a * a + d_b * b), new * (d_a * v[:, t] + d_b)
        d_top = d_p - d_old - d_new
        d_v[:, t] = d_a * new
        d_k[:, t] = d_new + np.where(first, 0, d_top)
        d_p = d_old + np.where(first, d_top, 0)
        d_decay += d_p
        d_a, d_b = d_a * old, d_b * old
        # the output: a mean of a / b and v
        d_out = cotangents.out[:, t]
        out, old, new = _read(states[t], u + k[:, t], v[:, t])
        d_a, d_b = d_a + d_out * old, d_b - d_out * old * out
        d_v[:, t] += d_out * new
        d_logit = d_out * new * (v[:, t] - out)
        d_k[:, t] += d_logit
        d_u += d_logit
        d_p = d_p + d_out * old * (a - b * out)
    found = {"w": d_decay * log_decay, "u": d_u, "k": d_k, "v": d_v, "state": np.stack([d_a, d_b, d_p], axis=1)}
    return Rwkv4Inputs(
        **{
            name: found[name].sum(axis=0, keepdims=True) if array.shape[0] == 1 else found[name]
            for name, array in named(inputs)
        }
    )
