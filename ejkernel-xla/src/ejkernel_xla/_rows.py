"""Helpers of the row normalisations on XLA."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.operations.common.rows.interface import NormCall, NormInputs, per_row, square_unit
from ejkernel.utils.dtypes import accumulator


def mean_of_rows(values: Any) -> Any:
    """Mean over the last axis, keeping it; 0 for rows without elements."""
    return jnp.sum(values, axis=-1, keepdims=True) / max(values.shape[-1], 1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def deviation(rows: Any, epsilon: float, unit: float) -> tuple[Any, Any]:
    """The mean of rows `[..., 1]` and `1 / sqrt(variance + epsilon)`, in one pass over rows whose mean is near 0.

    Its derivative is formed of normalised rows: powers of the variance of rows times a small unit would overflow.
    """
    mean = mean_of_rows(rows)
    variance = jnp.maximum(mean_of_rows((rows * unit) ** 2) - (mean * unit) ** 2, 0)
    return mean, unit * jax.lax.rsqrt(variance + epsilon * unit * unit)


def _deviation_jvp(epsilon: float, unit: float, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    found: Any = deviation(primals[0], epsilon, unit)
    mean, rstd = found
    d_mean = mean_of_rows(tangents[0])
    normalised = (primals[0] - mean) * rstd
    return (mean, rstd), (d_mean, -rstd * mean_of_rows(normalised * ((tangents[0] - d_mean) * rstd)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def inverse_rms(rows: Any, epsilon: float, unit: float) -> Any:
    """`1 / sqrt(mean square + epsilon)` of rows `[..., 1]`; its derivative as that of `deviation`."""
    return unit * jax.lax.rsqrt(mean_of_rows((rows * unit) ** 2) + epsilon * unit * unit)


def _inverse_rms_jvp(epsilon: float, unit: float, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    rstd: Any = inverse_rms(primals[0], epsilon, unit)
    return rstd, -rstd * mean_of_rows((primals[0] * rstd) * (tangents[0] * rstd))


deviation.defjvp(_deviation_jvp)
inverse_rms.defjvp(_inverse_rms_jvp)


def normalise(x: Any, epsilon: float) -> tuple[Any, Any]:
    """Rows divided by their root mean square, and its inverse `[..., 1]`, both in the accumulator dtype."""
    wide = x.astype(accumulator(x.dtype))
    rstd: Any = inverse_rms(wide, epsilon, square_unit(x.dtype, epsilon))
    return wide * rstd, rstd


def scaled(normalised: Any, scale: Any, scale_offset: float) -> Any:
    """`normalised * (scale + scale_offset)` in the dtype of `normalised`; forward, and in backward of its cotangent."""
    if scale is None:
        return normalised
    return normalised * (per_row(scale.astype(normalised.dtype), normalised.ndim) + scale_offset)


def apply_parameters(call: NormCall, normalised: Any, inputs: NormInputs) -> Any:
    """`normalised * (scale + scale_offset) + offset` in the dtype of `normalised`, rounded to that of x."""
    out = scaled(normalised, inputs.scale, call.scale_offset)
    if inputs.offset is not None:
        out = out + per_row(inputs.offset.astype(out.dtype), out.ndim)
    return out.astype(inputs.x.dtype)


def rms_gradient(normalised: Any, rstd: Any, weighted: Any) -> Any:
    """The cotangent of rows from that of the rows divided by their root mean square."""
    return rstd * (weighted - normalised * mean_of_rows(weighted * normalised))


def parameter_gradient(parameter: Any, per_element: Any) -> Any:
    """Sum a per-element gradient `[b, ..., d]` to the parameter's shape `[1 or b, d]`; None without a parameter."""
    if parameter is None:
        return None
    first = 1 if parameter.shape[0] == per_element.shape[0] else 0
    total = jnp.sum(per_element, axis=tuple(range(first, per_element.ndim - 1)))
    return total.reshape(parameter.shape).astype(parameter.dtype)
