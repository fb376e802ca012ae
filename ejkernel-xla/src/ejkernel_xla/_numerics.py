"""Dtype rules that every operation here follows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def accumulator(dtype: Any) -> Any:
    """The dtype in which sums and statistics of this dtype are kept: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def dot_precision(precision: str | None, dtype: Any) -> jax.lax.Precision:
    """What a product in this dtype is asked for: without a wish, float32 is not rounded to narrower types on the way."""
    if precision is not None:
        return jax.lax.Precision[precision.upper()]
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype).itemsize >= 4 else jax.lax.Precision.DEFAULT
