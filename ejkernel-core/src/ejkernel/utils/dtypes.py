"""Dtypes of results, products and sums, whatever `jax_numpy_dtype_promotion` says about implicit promotion."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
"""Dtypes of one byte in which both sides of a product may be."""


def common_dtype(*dtypes: Any) -> Any:
    """The narrowest dtype that holds what each of these does, by JAX's table of promotions."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def accumulator(dtype: Any) -> Any:
    """The accumulator dtype of this dtype: float32, or float64 for float64."""
    return common_dtype(dtype, jnp.float32)


def multiplied(array: Any, factor: Any) -> Any:
    """`array * factor` in the factor's dtype, rounded to the array's own. What is not finite stays as it is.

    That has no part in the factor's gradient either, so that places which nobody reads may hold NaN.
    """
    finite = jnp.isfinite(array)
    product = jnp.where(finite, array, 0).astype(factor.dtype) * factor
    return jnp.where(finite, product.astype(array.dtype), array)
