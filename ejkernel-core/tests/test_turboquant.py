"""Codebooks satisfy the conditions of optimality; random matrices are what they are said to be."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.quantization.turboquant.codebook import solve_lloyd_max
from ejkernel.quantization.turboquant.matrices import generate_projection_matrix, generate_rotation_matrix

POINTS = 400_001


def cells(dim: int, boundaries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mass, mean and mean square of the coordinate in every cell, by summing over angles: x = cos t has density sin(t)^(d - 2)."""
    angle = (np.arange(POINTS) + 0.5) * np.pi / POINTS
    x, density = np.cos(angle), np.sin(angle) ** (dim - 2)
    cell = np.searchsorted(boundaries, x)
    mass, first, second = (np.bincount(cell, density * x**power, boundaries.size + 1) for power in range(3))
    return mass / mass.sum(), first / mass, second / mass


@pytest.mark.parametrize("dim", [2, 3, 64, 128, 257])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 7])
def test_conditions_of_optimality(bits: int, dim: int) -> None:
    book = solve_lloyd_max(bits=bits, dim=dim)
    assert (book.bits, book.dim, book.n_levels) == (bits, dim, 2**bits)
    assert book.centroids.shape == (2**bits,) and (np.diff(book.centroids) > 0).all()
    np.testing.assert_allclose(book.boundaries, (book.centroids[1:] + book.centroids[:-1]) / 2, atol=1e-15)
    np.testing.assert_array_equal(book.centroids, -book.centroids[::-1])
    mass, mean, square = cells(dim, book.boundaries)
    np.testing.assert_allclose(book.centroids * dim**0.5, mean * dim**0.5, atol=2e-4)
    np.testing.assert_allclose(book.distortion, np.sum(mass * (square - mean**2)), rtol=2e-3)


def test_known_codebooks() -> None:
    uniform = solve_lloyd_max(bits=3, dim=3)  # a coordinate in three dimensions is uniform
    np.testing.assert_allclose(uniform.centroids, np.linspace(-7, 7, 8) / 8, atol=1e-12)
    normal = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}  # Max, 1960, table 1
    for bits, distortion in normal.items():
        np.testing.assert_allclose(solve_lloyd_max(bits=bits, dim=4096).distortion * 4096, distortion, rtol=2e-3)
    np.testing.assert_allclose(solve_lloyd_max(bits=1, dim=4096).centroids[1] * 64, (2 / np.pi) ** 0.5, rtol=1e-3)


@pytest.mark.parametrize("dim", [1, 2, 64, 128])
def test_rotation_is_orthogonal_and_repeats(dim: int) -> None:
    rotation = generate_rotation_matrix(seed=3, head_dim=dim)
    assert rotation.dtype == jnp.float32
    exact = np.asarray(rotation, np.float64)
    np.testing.assert_allclose(exact @ exact.T, np.eye(dim), atol=5e-7)
    np.testing.assert_array_equal(rotation, generate_rotation_matrix(seed=3, head_dim=dim))
    if dim > 1:
        assert float(jnp.abs(rotation - generate_rotation_matrix(seed=4, head_dim=dim)).max()) > 0.1


def test_rotated_vectors_have_the_codebook_s_error() -> None:
    """Rotation, nearest centroid and back: the error of a unit vector is `dim * distortion`, whatever the vector was."""
    dim, book = 128, solve_lloyd_max(bits=3, dim=128)
    rotation = np.asarray(generate_rotation_matrix(seed=0, head_dim=dim))
    vectors = np.random.default_rng(0).standard_normal((200, dim)) ** 5
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    rotated = vectors @ rotation.T
    error = np.sum((book.centroids[np.searchsorted(book.boundaries, rotated)] - rotated) ** 2, axis=1)
    np.testing.assert_allclose(error.mean(), dim * book.distortion, rtol=0.05)


def test_projection_keeps_inner_products_on_average() -> None:
    products = [np.asarray(generate_projection_matrix(seed=seed, projection_dim=64, head_dim=8)) for seed in range(200)]
    assert products[0].shape == (64, 8)
    mean = np.mean([one.T @ one for one in products], axis=0)
    np.testing.assert_allclose(mean, np.eye(8), atol=5 * (2 / (64 * 200)) ** 0.5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"bits": 0}, ValueError, "bits: got 0, expected 1 to 8"),
        ({"bits": 4, "dim": 1}, ValueError, "dim: got 1, expected a value >= 2"),
        ({"bits": 4.0}, TypeError, "bits: got 4.0, expected an int"),
    ],
)
def test_refused_codebooks(arguments: dict[str, int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        solve_lloyd_max(**arguments)


def test_refused_matrices() -> None:
    with pytest.raises(ValueError, match="head_dim: got 0, expected a value >= 1"):
        generate_rotation_matrix(seed=0, head_dim=0)
    with pytest.raises(ValueError, match="seed: got -1, expected a value >= 0"):
        generate_projection_matrix(seed=-1, projection_dim=4, head_dim=4)
