"""What implementations share."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.operations.newton_schulz.interface import NewtonSchulzCall


def normalised(call: NewtonSchulzCall, x: Any) -> Any:
    """Each matrix over its Frobenius norm, which is float32, in the dtype of products."""
    wide = x.astype(jnp.float32)
    return (wide / (jnp.sqrt(jnp.sum(wide * wide, axis=(1, 2), keepdims=True)) + call.eps)).astype(call.dtype)
