"""Dtype rules that every operation here follows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_FORGETS = -1e4
"""A log decay of which `exp` is 0, even in float64; sums of many are finite."""


def dot_precision(precision: str | None, dtype: Any) -> jax.lax.Precision:
    """Precision of a matmul in this dtype; without a request, float32 operands are not rounded to narrower types."""
    if precision is not None:
        return jax.lax.Precision[precision.upper()]
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype).itemsize >= 4 else jax.lax.Precision.DEFAULT


def finite_logs(decay: Any) -> Any:
    """Log decays with a finite one in place of -inf: 0/1 matrices select which are summed, and 0 times -inf is NaN."""
    return jnp.maximum(decay, jnp.asarray(_FORGETS, decay.dtype))


@jax.custom_jvp
def finite(array: Any) -> Any:
    """The array with 0 for NaN and infinities. Its derivative is the identity: what follows is linear in the array."""
    return jnp.where(jnp.isfinite(array), array, jnp.zeros((), array.dtype))


def _finite_and_tangent(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    return finite(*primals), tangents[0]


finite.defjvp(_finite_and_tangent)


def propagate_nan(array: Any) -> Any:
    """Per row (last axis): 0 if all of it is finite, else NaN."""
    return jnp.sum(array * jnp.zeros((), array.dtype), axis=-1)


def first_nonfinite(array: Any, axis: int, *, of_all_channels: bool) -> Any:
    """Index along `axis` of the first NaN or infinity, the axis' size where there is none; reduced axes stay with size 1.

    Args:
        array: any number of axes, channels last.
        axis: that of tokens, from the front.
        of_all_channels: of a token's channels together, rather than of each.
    """
    index = jax.lax.broadcasted_iota(jnp.int32, array.shape, axis)
    found = jnp.where(jnp.isfinite(array), jnp.int32(array.shape[axis]), index)
    axes = (axis, array.ndim - 1) if of_all_channels else axis
    return jnp.min(found, axis=axes, keepdims=True, initial=array.shape[axis])


def nan_where(flags: Any, dtype: Any) -> Any:
    """NaN where a flag is set, else 0: a constant for gradients."""
    return jnp.where(flags, jnp.asarray(jnp.nan, dtype), jnp.zeros((), dtype))
