"""Float8 values on XLA."""

from __future__ import annotations

import jax.numpy as jnp

from ejkernel.operations.quantize_float8.interface import QuantizeFloat8Call, QuantizeFloat8Inputs, QuantizeFloat8Outputs
from ejkernel.utils.dtypes import accumulator


def forward(call: QuantizeFloat8Call, inputs: QuantizeFloat8Inputs, config: None) -> QuantizeFloat8Outputs:
    wide = inputs.x.astype(accumulator(inputs.x.dtype))
    values = jnp.clip(wide * (1 / inputs.scale)[:, None, None], -call.most, call.most).astype(call.dtype)
    largest = jnp.max(jnp.abs(wide), axis=(1, 2), initial=0).astype(jnp.float32)
    return QuantizeFloat8Outputs(values, largest, values.swapaxes(1, 2) if call.transposed else None)
