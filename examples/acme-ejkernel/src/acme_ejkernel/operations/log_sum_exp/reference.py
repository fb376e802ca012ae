"""Both phases in NumPy, float64: clear, not fast."""

from __future__ import annotations

import numpy as np

from acme_ejkernel.operations.log_sum_exp.interface import LogSumExpCall, LogSumExpInputs, LogSumExpOutputs


def forward(call: LogSumExpCall, inputs: LogSumExpInputs) -> LogSumExpOutputs:
    scaled = call.scale * inputs.x
    largest = scaled.max(axis=1, initial=-np.inf)
    return LogSumExpOutputs(largest + np.log(np.exp(scaled - largest[:, None]).sum(axis=1)))


def backward(
    call: LogSumExpCall, inputs: LogSumExpInputs, outputs: LogSumExpOutputs, cotangents: LogSumExpOutputs
) -> LogSumExpInputs:
    weights = np.exp(call.scale * inputs.x - outputs.out[:, None])
    return LogSumExpInputs(call.scale * weights * cotangents.out[:, None])
