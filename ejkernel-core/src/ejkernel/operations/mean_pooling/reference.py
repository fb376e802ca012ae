"""`mean_pooling` in NumPy float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ejkernel.operations.mean_pooling.interface import MeanPoolingCall, MeanPoolingInputs, MeanPoolingOutputs


def _sequences(call: MeanPoolingCall, inputs: MeanPoolingInputs) -> Iterator[tuple[int, int, slice]]:
    """Row of the batch, index of the sequence and its tokens, for every sequence that has tokens."""
    batch, length = inputs.x.shape[:2]
    for row in range(batch):
        bounds = [0, length] if inputs.cu_seqlens is None else inputs.cu_seqlens[row % len(inputs.cu_seqlens)]
        for index in range(call.sequences):
            if bounds[index] < bounds[index + 1]:
                yield row, index, slice(bounds[index], bounds[index + 1])


def forward(call: MeanPoolingCall, inputs: MeanPoolingInputs) -> MeanPoolingOutputs:
    batch, _, heads, width = inputs.x.shape
    out = np.zeros((batch, call.sequences, heads, width))
    for row, index, tokens in _sequences(call, inputs):
        out[row, index] = inputs.x[row, tokens].mean(axis=0)
    return MeanPoolingOutputs(out)


def backward(
    call: MeanPoolingCall, inputs: MeanPoolingInputs, outputs: MeanPoolingOutputs, cotangents: MeanPoolingOutputs
) -> MeanPoolingInputs:
    d_x = np.zeros(inputs.x.shape)
    for row, index, tokens in _sequences(call, inputs):
        d_x[row, tokens] = cotangents.out[row, index] / (tokens.stop - tokens.start)
    return MeanPoolingInputs(d_x)
