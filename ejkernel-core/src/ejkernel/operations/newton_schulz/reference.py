"""`newton_schulz` in NumPy, float64: nothing is rounded."""

from __future__ import annotations

import numpy as np

from ejkernel.operations.newton_schulz.interface import NewtonSchulzCall, NewtonSchulzInputs, NewtonSchulzOutputs


def forward(call: NewtonSchulzCall, inputs: NewtonSchulzInputs) -> NewtonSchulzOutputs:
    x = inputs.x / (np.sqrt(np.sum(inputs.x**2, axis=(1, 2), keepdims=True)) + call.eps)
    for a, b, c in call.coefficients:
        gram = x @ x.swapaxes(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return NewtonSchulzOutputs(x)
