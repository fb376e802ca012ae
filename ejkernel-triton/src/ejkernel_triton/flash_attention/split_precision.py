"""float32 arrays as sums of three in bfloat16, which tensor cores multiply (Henry, Tang and Heinecke, Leveraging the bfloat16
Artificial Intelligence Datatype For Higher-Precision Computations, 2019)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_LARGEST = float(jnp.finfo(jnp.bfloat16).max)


def split_bf16(array: Any) -> Any:
    """float32 `[..., d]` as bfloat16 `[..., 3, d]`: every bit of it, largest part first.

    What is not finite is in the first part alone.
    """
    finite = jnp.isfinite(array)
    high = jnp.where(finite, jnp.clip(_rounded(array), -_LARGEST, _LARGEST), array)
    rest = jnp.where(finite, array - high, 0)
    middle = _rounded(rest)
    return jnp.stack([high, middle, rest - middle], axis=-2).astype(jnp.bfloat16)


def _rounded(array: Any) -> Any:
    """To bfloat16, and not a pair of conversions, which XLA may drop."""
    return jax.lax.reduce_precision(array, exponent_bits=8, mantissa_bits=7)
