"""The best scalar quantiser of one coordinate of a random unit vector.

A coordinate of a vector that is uniform on the sphere in d dimensions has the density `f(x) ~ (1 - x^2)^((d - 3) / 2)` on
[-1, 1], close to a normal one of variance 1 / d. Both integrals that the quantiser needs are known: that of `x f` in closed form,
that of f by a recurrence over d whose terms are all positive. So nothing is approximated or sampled here.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from ejkernel.errors import invalid, wrong_type

_MOST_STEPS = 200
_ROUNDING = 1e-8
"""Beside a coordinate's deviation of `dim**-0.5`: an error below it that no longer shrinks is rounding of the cells' masses."""


@dataclasses.dataclass(frozen=True, eq=False)
class LloydMaxCodebook:
    """A quantiser: values between two neighbouring boundaries become the centroid there.

    Attributes:
        bits: of an index.
        dim: d.
        n_levels: `2**bits`.
        centroids: float64 `[n_levels]`, ascending; each is the mean of the values that become it.
        boundaries: float64 `[n_levels - 1]`, half way between neighbouring centroids.
        distortion: the expected squared error of one coordinate.
    """

    bits: int
    dim: int
    n_levels: int
    centroids: np.ndarray
    boundaries: np.ndarray
    distortion: float


def solve_lloyd_max(bits: int, dim: int = 128) -> LloydMaxCodebook:
    """The codebook that minimises the expected squared error.

    Args:
        bits: of an index, 1 to 8.
        dim: dimensions of the unit vectors, at least 2.

    Raises:
        ValueError: a value is out of range.
        TypeError: not an integer.

    Source: Lloyd, Least Squares Quantization in PCM, 1982; Max, Quantizing for Minimum Distortion, 1960; for rotated vectors
        Zandieh et al., TurboQuant, 2025.
    """
    for name, value, low, high in (("bits", bits, 1, 8), ("dim", dim, 2, None)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(name, repr(value), "an int")
        if value < low or (high is not None and value > high):
            raise invalid(name, value, f"{low} to {high}" if high else f"a value >= {low}")
    return _solve(bits, dim)


@functools.cache
def _solve(bits: int, dim: int) -> LloydMaxCodebook:
    """Newton's method on `centroid = mean of its cell`, over the positive half; where it overshoots, a step of Lloyd's."""
    half = _start(2 ** (bits - 1), dim)
    means, slopes = _means(half, dim)
    for _ in range(_MOST_STEPS):
        error = np.max(np.abs(half - means))
        newton = half - np.linalg.solve(np.eye(half.size) - slopes, half - means)
        if newton[0] > 0 and newton[-1] < 1 and np.all(np.diff(newton) > 0):
            found, found_slopes = _means(newton, dim)
            if np.max(np.abs(newton - found)) < error:
                half, means, slopes = newton, found, found_slopes
                continue
        if error * dim**0.5 < _ROUNDING:
            break
        half = means
        means, slopes = _means(half, dim)
    half_boundaries = (half[1:] + half[:-1]) / 2
    edges = np.concatenate([[0.0], half_boundaries, [1.0]])
    mass = np.diff(_mass_from_0(edges, dim)) / _mass_from_0(np.ones(1), dim)[0]
    centroids = np.concatenate([-half[::-1], half])
    boundaries = np.concatenate([-half_boundaries[::-1], [0.0], half_boundaries])
    for array in (centroids, boundaries):
        array.setflags(write=False)
    return LloydMaxCodebook(bits, dim, 2**bits, centroids, boundaries, float(1 / dim - np.sum(mass * half**2)))


def _start(levels: int, dim: int) -> np.ndarray:
    """Quantiles of `f^(1/3)`, the density of centroids when there are many."""
    x = np.linspace(0.0, 1.0, 20001)
    middles = (x[1:] + x[:-1]) / 2
    density = np.exp((dim - 3) / 6 * np.log1p(-(middles**2)))
    cumulative = np.concatenate([[0.0], np.cumsum(density)])
    return np.interp((np.arange(levels) + 0.5) / levels, cumulative / cumulative[-1], x)


def _means(half: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Means of the cells of positive centroids, and their derivatives by the centroids."""
    edges = np.concatenate([[0.0], (half[1:] + half[:-1]) / 2, [1.0]])
    mass = np.diff(_mass_from_0(edges, dim))
    moments = -np.diff((1 - edges**2) ** ((dim - 1) / 2)) / (dim - 1)
    means = moments / mass
    density = (1 - edges[1:-1] ** 2) ** ((dim - 3) / 2)  # at the edges that move
    below = np.concatenate([[0.0], density * (means[1:] - edges[1:-1]) / mass[1:]]) / 2
    above = np.concatenate([density * (edges[1:-1] - means[:-1]) / mass[:-1], [0.0]]) / 2
    slopes = np.diag(below + above) + np.diag(below[1:], -1) + np.diag(above[:-1], 1)
    return means, slopes


def _mass_from_0(x: np.ndarray, dim: int) -> np.ndarray:
    """`integral of (1 - t^2)^((dim - 3) / 2) from 0 to x`, that is, of `cos^(dim - 2)` up to arcsin x."""
    cosine = np.sqrt(1 - x**2)
    total = np.arcsin(x) if dim % 2 == 0 else x.copy()
    for power in range(2 + dim % 2, dim - 1, 2):
        total = (cosine ** (power - 1) * x + (power - 1) * total) / power
    return total
