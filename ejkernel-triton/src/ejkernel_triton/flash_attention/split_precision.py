"""Split-precision emulation of float32 by three bfloat16 terms (Henry, Tang and Heinecke, Leveraging the bfloat16 Artificial
Intelligence Datatype For Higher-Precision Computations, 2019)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_LARGEST = float(jnp.finfo(jnp.bfloat16).max)


def split_bf16(array: Any) -> Any:
    """float32 `[..., d]` as bfloat16 terms `[..., 3, d]`, largest first. Their sum is exact.

    NaN and infinities are in the first term only.
    """
    finite = jnp.isfinite(array)
    high = jnp.where(finite, jnp.clip(_rounded(array), -_LARGEST, _LARGEST), array)
    rest = jnp.where(finite, array - high, 0)
    middle = _rounded(rest)
    return jnp.stack([high, middle, rest - middle], axis=-2).astype(jnp.bfloat16)


def _rounded(array: Any) -> Any:
    """Round to bfloat16. XLA may drop a pair of conversions instead."""
    return jax.lax.reduce_precision(array, exponent_bits=8, mantissa_bits=7)
