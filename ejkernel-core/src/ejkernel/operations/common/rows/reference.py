"""What the NumPy references of the normalisations over rows share."""

from __future__ import annotations

from typing import Any

from ejkernel.operations.common.rows.interface import ScaledCall, per_row


def mean_of_rows(values: Any) -> Any:
    """Mean over the last axis, keeping it; 0 for rows without elements."""
    return values.sum(axis=-1, keepdims=True) / max(values.shape[-1], 1)


def apply_parameters(call: ScaledCall, normalised: Any, scale: Any, offset: Any = None) -> Any:
    """`normalised * (scale + scale_offset) + offset`."""
    out = normalised if scale is None else normalised * (per_row(scale, normalised.ndim) + call.scale_offset)
    return out if offset is None else out + per_row(offset, normalised.ndim)


def parameter_gradient(parameter: Any, per_element: Any) -> Any:
    """The sum of a per-element gradient `[b, ..., d]` that belongs to a parameter `[1 or b, d]`; None without one."""
    if parameter is None:
        return None
    per_batch = per_element.sum(axis=tuple(range(1, per_element.ndim - 1)))
    return per_batch if parameter.shape[0] == per_element.shape[0] else per_batch.sum(axis=0, keepdims=True)
