"""Dtype rules that every operation here follows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def dot_precision(precision: str | None, dtype: Any) -> jax.lax.Precision:
    """Precision of a matmul in this dtype; without a request, float32 operands are not rounded to narrower types."""
    if precision is not None:
        return jax.lax.Precision[precision.upper()]
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype).itemsize >= 4 else jax.lax.Precision.DEFAULT
