"""What the losses over a vocabulary share: which tokens count, reductions, and the axes of a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.compositions import mesh as _mesh
from ejkernel.compositions.axes import Axes
from ejkernel.errors import invalid, wrong_type

REDUCTIONS = ("none", "mean", "sum")


def check_reduction(reduction: Any) -> None:
    """Refuse an unknown reduction."""
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise invalid("reduction", repr(reduction), f"one of {', '.join(REDUCTIONS)}")


def counted(rows: tuple[int, ...], weights: Any, attention_mask: Any) -> tuple[Any, Any]:
    """Which tokens count, bool, and how much, float32; both of the rows' shape. A token of weight 0 does not."""
    kept = jnp.ones(rows, bool)
    for name, array in (("weights", weights), ("attention_mask", attention_mask)):
        if array is None:
            continue
        if not hasattr(array, "dtype"):
            raise wrong_type(name, type(array).__name__, "an array")
        if tuple(array.shape) != rows:
            raise invalid(name, f"shape {tuple(array.shape)}", f"{rows}, one for each token")
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            raise wrong_type(name, f"dtype {array.dtype}", "real numbers or bool")
        kept = kept & (array != 0)
    if weights is None:
        return kept, kept.astype(jnp.float32)
    return kept, jnp.where(kept, jax.lax.stop_gradient(weights).astype(jnp.float32), 0)


def summed(x: Any, axes: Axes) -> Any:
    """The sum of an array over this device's tokens and those of other devices along the axes."""
    total = jnp.sum(x)
    return jax.lax.psum(total, axes) if axes else total


def reduced(x: Any, weight_sum: Any, reduction: str, axes: Axes) -> Any:
    """Weighted losses of tokens, reduced; a mean over no token is 0."""
    if reduction == "none":
        return x
    total = summed(x, axes)
    return total if reduction == "sum" else total / jnp.where(weight_sum == 0, 1, weight_sum)


def split_axes(spec: Any, rank: int) -> tuple[Axes, Axes]:
    """The mesh axes over which a spec splits all axes but the last, and the last; also those of one device."""
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec or ()]
    entries += [()] * (rank - len(entries))
    return tuple(axis for entry in entries[:-1] for axis in entry), entries[-1]


def several(axes: Axes, mesh: Any) -> Axes:
    """Those of the axes that have more than one device."""
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def specs_of(
    arrays: Mapping[str, Any], positional: tuple[str, ...], mesh: Any, in_specs: Any, out_specs: Any
) -> dict[str, Any]:
    """The specs of the present arrays; none without a mesh."""
    if not _mesh.is_sharded(mesh, in_specs, out_specs):
        return {}
    return dict(_mesh.named_specs(arrays, positional, in_specs))
