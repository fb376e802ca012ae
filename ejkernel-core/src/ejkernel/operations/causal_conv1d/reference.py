"""`causal_conv1d` in NumPy float64: one sequence after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ejkernel.call.arrays import named
from ejkernel.operations.causal_conv1d.interface import CausalConv1dCall, CausalConv1dInputs, CausalConv1dOutputs


class _Run(NamedTuple):
    """Tokens that see one another, the state that they belong to, and whether they are its first and its last run."""

    at: tuple[int, int]
    tokens: slice
    first: bool
    last: bool


def _runs(call: CausalConv1dCall, inputs: CausalConv1dInputs) -> Iterator[_Run]:
    batch, length = inputs.x.shape[:2]
    for row in range(batch):
        if inputs.cu_seqlens is not None:
            bounds = inputs.cu_seqlens[row % len(inputs.cu_seqlens)]
            for index in range(call.sequences):
                yield _Run((row, index), slice(bounds[index], bounds[index + 1]), True, True)
            continue
        ids = np.zeros(length, int) if inputs.seg_ids is None else inputs.seg_ids[row % len(inputs.seg_ids)]
        edges = [0, *(np.flatnonzero(np.diff(ids)) + 1), length] if length else [0]
        runs = [slice(*pair) for pair in itertools.pairwise(edges) if ids[pair[0]] >= 0]
        runs = runs or [slice(0, 0)]
        for run in runs:
            yield _Run((row, 0), run, run == runs[0], run == runs[-1])


def _window(call: CausalConv1dCall, inputs: CausalConv1dInputs, run: _Run) -> Any:
    """The inputs of a run `[w - 1 + t, c]`, after those before it."""
    before = np.zeros((call.width - 1, inputs.x.shape[2]))
    if run.first and inputs.initial_state is not None:
        before = inputs.initial_state[run.at]
    return np.concatenate([before, inputs.x[run.at[0], run.tokens]])


def _linear(call: CausalConv1dCall, inputs: CausalConv1dInputs, run: _Run, window: Any) -> tuple[Any, Any]:
    """The taps `[w, c]`, and the result before the activation `[t, c]`."""
    taps = inputs.weight[run.at[0] % len(inputs.weight)].T
    count = len(window) - call.width + 1
    out = sum(tap * window[j : j + count] for j, tap in enumerate(taps))
    return taps, out if inputs.bias is None else out + inputs.bias[run.at[0] % len(inputs.bias)]


def forward(call: CausalConv1dCall, inputs: CausalConv1dInputs) -> CausalConv1dOutputs:
    (batch, _, channels), out = inputs.x.shape, np.zeros(inputs.x.shape)
    final = np.zeros((batch, call.sequences, call.width - 1, channels))
    for run in _runs(call, inputs):
        window = _window(call, inputs, run)
        linear = _linear(call, inputs, run, window)[1]
        out[run.at[0], run.tokens] = linear if call.activation is None else linear * _sigmoid(linear)
        if run.last:
            final[run.at] = window[len(window) - call.width + 1 :]
    return CausalConv1dOutputs(out, final if call.return_state else None)


def _sigmoid(x: Any) -> Any:
    return 0.5 * (1 + np.tanh(0.5 * x))


def backward(
    call: CausalConv1dCall, inputs: CausalConv1dInputs, outputs: CausalConv1dOutputs, cotangents: CausalConv1dOutputs
) -> CausalConv1dInputs:
    arrays = {name: array for name, array in named(inputs) if name not in ("seg_ids", "cu_seqlens")}
    grads: dict[str, Any] = {name: np.zeros((len(inputs.x), *array.shape[1:])) for name, array in arrays.items()}
    for run in _runs(call, inputs):
        row = run.at[0]
        window = _window(call, inputs, run)
        taps, linear = _linear(call, inputs, run, window)
        d_out = cotangents.out[row, run.tokens]
        if call.activation is not None:
            gate = _sigmoid(linear)
            d_out = d_out * gate * (1 + linear * (1 - gate))
        d_window = np.zeros(window.shape)
        for j, tap in enumerate(taps):
            d_window[j : j + len(d_out)] += tap * d_out
            grads["weight"][row, :, j] += (window[j : j + len(d_out)] * d_out).sum(axis=0)
        if run.last and cotangents.final_state is not None:
            d_window[len(window) - call.width + 1 :] += cotangents.final_state[run.at]
        if "bias" in grads:
            grads["bias"][row] += d_out.sum(axis=0)
        if run.first and "initial_state" in grads:
            grads["initial_state"][run.at] += d_window[: call.width - 1]
        grads["x"][row, run.tokens] += d_window[call.width - 1 :]
    return CausalConv1dInputs(
        **{name: grad.sum(axis=0, keepdims=True) if len(arrays[name]) == 1 else grad for name, grad in grads.items()}
    )
