"""Mesh axes of a surrounding `shard_map`: their size, and sending arrays round them."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.errors import invalid, wrong_type

Axes = tuple[str, ...]


def as_axes(axis_name: Any) -> Axes:
    """One name or several as a tuple; None is no axis."""
    axes = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(axes, (tuple, list)) or not all(isinstance(axis, str) for axis in axes):
        raise wrong_type("axis_name", repr(axis_name), "the name of a mesh axis, several of them, or None")
    return tuple(axes)


def axis_size(axes: Axes) -> int:
    """Number of devices along the axes.

    Raises:
        ValueError: one of them is no axis of a surrounding `shard_map`.
    """
    try:
        return jax.lax.axis_size(axes)
    except NameError:
        remedy = "call it inside jax.shard_map over that axis, or pass mesh=, in_specs= and out_specs="
        raise invalid("axis_name", repr(axes), "a mesh axis of a surrounding shard_map", remedy=remedy) from None


def check_mesh_axes(axes: Axes, mesh: Any) -> None:
    """Refuse an axis that the mesh lacks."""
    for axis in axes:
        if axis not in mesh.shape:
            raise invalid("axis_name", repr(axis), f"an axis of the mesh: {', '.join(mesh.shape)}")


def rotated(arrays: Any, axes: Axes, size: int, distance: int) -> Any:
    """Every device's arrays, sent `distance` devices on."""
    if distance % size == 0:
        return arrays
    pairs = [(device, (device + distance) % size) for device in range(size)]
    return jax.tree.map(lambda array: jax.lax.ppermute(array, axes, pairs), arrays)
