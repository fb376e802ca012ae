"""Newton-Schulz iterations on XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.operations.newton_schulz.interface import NewtonSchulzCall, NewtonSchulzInputs, NewtonSchulzOutputs
from ejkernel.operations.newton_schulz.phases import normalised


def forward(call: NewtonSchulzCall, inputs: NewtonSchulzInputs, config: None) -> NewtonSchulzOutputs:
    x = normalised(call, inputs.x)
    for a, b, c in call.coefficients:
        gram = _product(x, x.swapaxes(1, 2)).astype(call.dtype)
        polynomial = (b * gram.astype(jnp.float32) + c * _product(gram, gram)).astype(call.dtype)
        x = (a * x.astype(jnp.float32) + _product(polynomial, x)).astype(call.dtype)
    return NewtonSchulzOutputs(x.astype(call.x.dtype))


def _product(left: Any, right: Any) -> Any:
    """Summed in float32, and float32 operands are not rounded."""
    return jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
