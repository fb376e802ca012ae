"""What the normalisations over rows share on XLA."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.operations._rows.interface import NormCall, NormInputs, per_row


def mean_of_rows(values: Any) -> Any:
    """Mean over the last axis, keeping it; 0 for rows without elements."""
    return jnp.sum(values, axis=-1, keepdims=True) / max(values.shape[-1], 1)


def apply_parameters(call: NormCall, normalised: Any, inputs: NormInputs) -> Any:
    """`normalised * (scale + scale_offset) + offset` in the dtype of `normalised`, rounded to that of x."""
    out, dtype = normalised, normalised.dtype
    if inputs.scale is not None:
        out = out * (per_row(inputs.scale.astype(dtype), out.ndim) + call.scale_offset)
    if inputs.offset is not None:
        out = out + per_row(inputs.offset.astype(dtype), out.ndim)
    return out.astype(inputs.x.dtype)


def weighted_gradient(call: NormCall, scale: Any, grad: Any) -> Any:
    """The cotangent of the normalised rows."""
    return grad if scale is None else grad * (per_row(scale.astype(grad.dtype), grad.ndim) + call.scale_offset)


def parameter_gradient(parameter: Any, per_element: Any) -> Any:
    """Sum a per-element gradient `[b, ..., d]` to the parameter's shape `[1 or b, d]`; None without a parameter."""
    if parameter is None:
        return None
    first = 1 if parameter.shape[0] == per_element.shape[0] else 0
    total = jnp.sum(per_element, axis=tuple(range(first, per_element.ndim - 1)))
    return total.reshape(parameter.shape).astype(parameter.dtype)
