"""`quantize_float8` in NumPy. Reciprocal and product are rounded to float32, as the contract says."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ejkernel.operations.quantize_float8.interface import QuantizeFloat8Call, QuantizeFloat8Inputs, QuantizeFloat8Outputs


def forward(call: QuantizeFloat8Call, inputs: QuantizeFloat8Inputs) -> QuantizeFloat8Outputs:
    with np.errstate(all="ignore"):
        scaled = inputs.x.astype(np.float32) * (np.float32(1) / inputs.scale.astype(np.float32))[:, None, None]
    values = np.clip(scaled, -call.most, call.most).astype(jnp.dtype(call.dtype)).astype(np.float64)
    largest = np.max(np.abs(inputs.x), axis=(1, 2), initial=0)
    return QuantizeFloat8Outputs(values, largest, values.swapaxes(1, 2) if call.transposed else None)
