"""Queries and keys divided by their lengths, for platforms that do so in JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.operations.common.rows.interface import square_unit
from ejkernel.operations.delta_rule.interface import NORM_EPSILON


def inverse_length(x: Any) -> Any:
    """`1 / sqrt(sum x^2 + NORM_EPSILON)` of rows `[..., 1]`, whose squares neither overflow nor vanish."""
    unit = square_unit(x.dtype, NORM_EPSILON)
    return unit * jax.lax.rsqrt(jnp.sum((x * unit) ** 2, axis=-1, keepdims=True) + NORM_EPSILON * unit * unit)


@jax.custom_jvp
def divided_by_length(x: Any) -> Any:
    """Rows `[..., d]`, float32 or wider, divided by their lengths; the derivative of a row of zeros is finite too."""
    return x * inverse_length(x)


def _jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    out, scaled = divided_by_length(*primals), tangents[0] * inverse_length(*primals)
    return out, scaled - out * jnp.sum(out * scaled, axis=-1, keepdims=True)


divided_by_length.defjvp(_jvp)
