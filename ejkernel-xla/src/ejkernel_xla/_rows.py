"""Helpers of the row normalisations on XLA."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.operations.common.rows.interface import NormCall, NormInputs, per_row


def mean_of_rows(values: Any) -> Any:
    """Mean over the last axis, keeping it; 0 for rows without elements."""
    return jnp.sum(values, axis=-1, keepdims=True) / max(values.shape[-1], 1)


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
