"""Dtype rules that every operation here follows."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def accumulator(dtype: Any) -> Any:
    """The dtype in which sums and statistics of this dtype are kept: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)
