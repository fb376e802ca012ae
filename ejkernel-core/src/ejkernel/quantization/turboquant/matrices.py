"""Random matrices, made on the host in float64: a seed gives the same matrix on every device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.errors import invalid, wrong_type

_ROTATION, _PROJECTION = 1, 2
"""Beside the seed, so that one seed gives unrelated matrices, unrelated too to what a user draws from it."""


def generate_rotation_matrix(seed: int, head_dim: int, dtype: Any = jnp.float32) -> jax.Array:
    """An orthogonal matrix, uniform among all of them: Q of the QR decomposition of a Gaussian matrix, R's diagonal positive.

    Args:
        seed: an integer >= 0.
        head_dim: rows and columns, at least 1.
        dtype: of the result.

    Returns:
        `[head_dim, head_dim]`, as orthogonal as its dtype allows.

    Raises:
        ValueError: a value is out of range.
        TypeError: not an integer.

    Source: Mezzadri, How to generate random matrices from the classical compact groups, 2007.
    """
    _check(seed=seed, head_dim=head_dim)
    orthogonal, upper = np.linalg.qr(np.random.default_rng((seed, _ROTATION)).standard_normal((head_dim, head_dim)))
    return jnp.asarray(orthogonal * np.where(np.diagonal(upper) < 0, -1.0, 1.0), dtype)


def generate_projection_matrix(seed: int, projection_dim: int, head_dim: int, dtype: Any = jnp.float32) -> jax.Array:
    """A Johnson-Lindenstrauss sketch: independent normal entries of variance `1 / projection_dim`, so `E[S^T S] = 1`.

    Args:
        seed: an integer >= 0.
        projection_dim: rows, at least 1.
        head_dim: columns, at least 1.
        dtype: of the result.

    Returns:
        `[projection_dim, head_dim]`.

    Raises:
        ValueError: a value is out of range.
        TypeError: not an integer.
    """
    _check(seed=seed, projection_dim=projection_dim, head_dim=head_dim)
    entries = np.random.default_rng((seed, _PROJECTION)).standard_normal((projection_dim, head_dim))
    return jnp.asarray(entries / np.sqrt(projection_dim), dtype)


def _check(**values: Any) -> None:
    for name, value in values.items():
        low = 0 if name == "seed" else 1
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise wrong_type(name, repr(value), "an int")
        if value < low:
            raise invalid(name, value, f"a value >= {low}")
