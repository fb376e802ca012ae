"""Helpers: results and gradients of public functions beside NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_float(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.floating)


def assert_close(got: Any, wanted: Any, tolerance: float, what: str = "") -> None:
    """Same shape, and the largest error is within `tolerance` of the largest magnitude."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape, what
    assert np.isfinite(got).all(), what
    error, size = np.abs(got - wanted).max(initial=0), np.abs(wanted).max(initial=0)
    assert error <= tolerance * size + 1e-30, f"{what}: error {error:.3g} beside magnitude {size:.3g}"


def check_by_tokens(function: Callable[..., Any], by_tokens: Callable[..., Any], arrays: Mapping[str, Any]) -> None:
    """Values of a function beside float64 NumPy, and its gradients beside slopes of that along a direction of each array."""
    floats = {name: jnp.asarray(value) for name, value in arrays.items() if is_float(value)}
    wide = {name: np.asarray(value, np.float64) if is_float(value) else value for name, value in arrays.items()}
    outputs, pull = jax.vjp(jax.jit(lambda floats: function(**{**arrays, **floats})), floats)
    leaves, structure = jax.tree.flatten(outputs)
    wanted = by_tokens(**wide)
    assert jax.tree.structure(wanted) == structure
    rng = np.random.default_rng(1)
    weights = [rng.standard_normal(leaf.shape) for leaf in leaves]
    for index, (got, expected) in enumerate(zip(leaves, jax.tree.leaves(wanted), strict=True)):
        assert_close(got, expected, 2e-5, f"result {index}")
    cotangents = [jnp.asarray(weight, leaf.dtype) for weight, leaf in zip(weights, leaves, strict=True)]
    (gradients,) = pull(jax.tree.unflatten(structure, cotangents))
    for name, gradient in gradients.items():
        direction = rng.standard_normal(gradient.shape)
        moved = [by_tokens(**{**wide, name: wide[name] + step * direction}) for step in (1e-6, -1e-6)]
        sums = [sum(np.vdot(*pair) for pair in zip(jax.tree.leaves(found), weights, strict=True)) for found in moved]
        slope, along = (sums[0] - sums[1]) / 2e-6, np.vdot(np.asarray(gradient, np.float64), direction)
        size = float(np.linalg.norm(np.asarray(gradient, np.float64)))
        assert 0 < size < np.inf, name
        assert abs(slope - along) <= 2e-4 * size + 1e-6, f"gradient of {name}: {along:.6g}, slope {slope:.6g}"
