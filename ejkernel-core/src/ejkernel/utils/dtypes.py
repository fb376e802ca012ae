"""Dtypes of results and of sums, whatever `jax_numpy_dtype_promotion` says about implicit promotion."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


def common_dtype(*dtypes: Any) -> Any:
    """The narrowest dtype that holds what each of these does, by JAX's table of promotions."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def accumulator(dtype: Any) -> Any:
    """The accumulator dtype of this dtype: float32, or float64 for float64."""
    return common_dtype(dtype, jnp.float32)
