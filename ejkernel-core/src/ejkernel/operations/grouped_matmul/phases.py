"""What implementations share besides their kernels: calls that multiply nothing, and gradients made of two kinds of products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ejkernel.operations.grouped_matmul.groups import bounds_of, matrix_of_rows, rows_with_matrix
from ejkernel.operations.grouped_matmul.interface import (
    OPERATION,
    GroupedMatmulCall,
    GroupedMatmulInputs,
    GroupedMatmulOutputs,
)


def bounds_of_call(call: GroupedMatmulCall, inputs: GroupedMatmulInputs) -> Any:
    """As `bounds_of`."""
    batch, rows, _ = call.lhs.shape
    return bounds_of(inputs.group_sizes, inputs.group_offset, batch, rows, call.rhs.shape[1])


def multiplies_nothing(call: GroupedMatmulCall) -> bool:
    """Whether there is no row, no matrix or no column."""
    return call.lhs.shape[0] * call.lhs.shape[1] * call.rhs.shape[1] * call.columns == 0


def forward_of_nothing(call: GroupedMatmulCall, inputs: GroupedMatmulInputs) -> GroupedMatmulOutputs:
    """What is there, or zeros."""
    existing = inputs.existing_out
    existing = jnp.zeros((), jnp.dtype(call.preferred_element_type)) if existing is None else existing
    return GroupedMatmulOutputs(jnp.broadcast_to(existing, (*call.lhs.shape[:2], call.columns)))


def backward_of_nothing(inputs: GroupedMatmulInputs, grad: Any) -> GroupedMatmulInputs:
    """Zeros; the cotangent for what is there."""
    zeros = {name: jnp.zeros_like(value) for name, value in OPERATION.moving(inputs).items()}
    return gradients_of(zeros | ({} if inputs.existing_out is None else {"existing_out": grad}))


def gradients_of(found: dict[str, Any]) -> GroupedMatmulInputs:
    """None for what is not among them."""
    return GroupedMatmulInputs(**{**dict.fromkeys(GroupedMatmulInputs._fields), **found})


def gradient_like(value: Any, gradient: Any) -> Any:
    """In the dtype of the input; over the batch or the columns if they share the input."""
    axes = tuple(axis for axis, size in enumerate(value.shape) if size != gradient.shape[axis])
    return (jnp.sum(gradient, axis=axes, keepdims=True) if axes else gradient).astype(value.dtype)


def backward_by_products(
    call: GroupedMatmulCall,
    inputs: GroupedMatmulInputs,
    grad: Any,
    *,
    of_lhs: Callable[[Any, Any, Any], Any],
    of_matrices: Callable[[Any, Any], dict[str, Any]],
    of_bias: Callable[[Any, Any], Any],
) -> GroupedMatmulInputs:
    """All gradients. The cotangent is rounded to the dtype of the products before it is multiplied, after it is scaled per column.

    Args:
        call, inputs: of a call that multiplies something.
        grad: `[b, m, n]`, the cotangent.
        of_lhs: of the bounds, a cotangent and a scale per matrix, or None: rows times the transpose of their matrices.
        of_matrices: of the bounds and a cotangent: the gradients of rhs and rhs_scale, those that are wanted, by name.
        of_bias: of the bounds and the cotangent: its sums over the rows of every matrix, as the gradient of the bias.
    """
    bounds = bounds_of_call(call, inputs)
    found: dict[str, Any] = {}
    if inputs.existing_out is not None:
        found["existing_out"] = jnp.where(rows_with_matrix(bounds, call.lhs.shape[1])[..., None], 0, grad)
    if inputs.bias is not None:
        found["bias"] = of_bias(bounds, grad)
    if inputs.lhs.size:
        found["lhs"] = of_lhs(bounds, *scaled_along_the_sum(call, inputs.rhs_scale, bounds, grad))
        found |= of_matrices(bounds, grad.astype(call.product_dtype))
    else:
        zeros = OPERATION.moving(inputs._replace(existing_out=None, bias=None))
        found |= {name: jnp.zeros_like(value) for name, value in zeros.items()}
    return gradients_of(found)


def scaled_along_the_sum(call: GroupedMatmulCall, scale: Any, bounds: Any, grad: Any) -> tuple[Any, Any]:
    """The cotangent for the gradient of lhs, in the dtype of the products, and the scale that can wait until they are summed up."""
    if scale is not None and scale.shape[2] > 1:
        own = matrix_of_rows(bounds, grad.shape[1])
        scale = jnp.broadcast_to(scale, (grad.shape[0], *scale.shape[1:]))
        grad = grad.astype(jnp.float32) * jnp.take_along_axis(scale, own[..., None], axis=1).astype(jnp.float32)
        scale = None
    return grad.astype(call.product_dtype), scale
