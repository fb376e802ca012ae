"""`rope` on XLA, and the angles that go into it."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_reference import cases_named, check_case, check_second_order, check_vmap, problems

import ejkernel


@problems("rope")
def test_against_reference(case: Any, dtype: str) -> None:
    check_case("rope", case, dtype)


@cases_named("rope", "gqa", "per-channel", "interleaved", "partial-interleaved", "heads-first")
def test_vmap(case: Any) -> None:
    check_vmap("rope", case)


def _complex_rotation(x: Any, angles: Any) -> Any:
    """Neighbouring channels as complex numbers, turned by `angles [t, d / 2]`."""
    turned = jax.lax.complex(x[..., 0::2], x[..., 1::2]) * jax.lax.complex(jnp.cos(angles), jnp.sin(angles))[None, :, None]
    return jnp.stack([turned.real, turned.imag], -1).reshape(x.shape)


def test_interleaved_is_a_complex_rotation_to_second_order() -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    x, angles = jax.random.normal(keys[0], (1, 3, 2, 4)), jax.random.normal(keys[1], (3, 2))
    check_second_order(
        lambda x, angles: ejkernel.rope(x, jnp.cos(angles), jnp.sin(angles), interleaved=True), _complex_rotation, x, angles
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_of_queries_and_keys_depend_on_the_distance_alone(interleaved: bool) -> None:
    embedding = ejkernel.LlamaRotaryEmbedding(16, interleaved=interleaved)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 2, 16))

    def product(position: int, distance: int) -> Any:
        (cos, sin), (far_cos, far_sin) = (embedding(jnp.array([p])) for p in (position, position + distance))
        at = ejkernel.rope(q, cos, sin, interleaved=interleaved)
        return jnp.vdot(at, ejkernel.rope(k, far_cos, far_sin, interleaved=interleaved))

    np.testing.assert_allclose(product(0, 3), product(500, 3), rtol=1e-4)
    assert abs(float(product(0, 3) - product(0, 4))) > 1e-2


@jax.numpy_rank_promotion("raise")
@jax.numpy_dtype_promotion("strict")
def test_angles() -> None:
    positions = jnp.array([[0, 1, 7], [100000, -3, 2]])
    cos, sin = ejkernel.LlamaRotaryEmbedding(8, base=500000.0)(positions)
    frequencies = 1 / 500000.0 ** (np.arange(0, 8, 2) / 8)
    angles = np.asarray(positions)[..., None] * np.tile(frequencies, 2)
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-6)
    for floating in (positions.astype(jnp.float32), np.asarray(positions, np.float64), positions.tolist()):
        np.testing.assert_array_equal(ejkernel.LlamaRotaryEmbedding(8, base=500000.0)(floating)[0], cos)
    half, _ = ejkernel.LlamaRotaryEmbedding(8, base=500000.0)(jnp.array([0.5], jnp.bfloat16))
    np.testing.assert_allclose(half[0, :4], np.cos(0.5 * frequencies), atol=1e-6)
    with pytest.raises(TypeError, match="position_ids: got dtype bool, expected integers or floating numbers"):
        ejkernel.LlamaRotaryEmbedding(8)(positions > 0)
    neighbours, _ = ejkernel.LlamaRotaryEmbedding(8, base=500000.0, interleaved=True)(positions)
    np.testing.assert_array_equal(neighbours[..., 0::2], cos[..., :4])
    np.testing.assert_array_equal(neighbours[..., 1::2], cos[..., :4])


def test_scaled_angles() -> None:
    linear = ejkernel.LlamaRotaryEmbedding(64, scaling={"rope_type": "linear", "factor": 4.0})
    plain = ejkernel.LlamaRotaryEmbedding(64, 500000.0)
    np.testing.assert_allclose(linear(jnp.array([40]))[1], ejkernel.LlamaRotaryEmbedding(64)(jnp.array([10]))[1], atol=1e-6)
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    scaled = ejkernel.LlamaRotaryEmbedding(64, 500000.0, scaling={"rope_type": "llama3", **scaling})
    period = 2 * math.pi / plain.frequencies
    ratio = plain.frequencies / scaled.frequencies
    np.testing.assert_allclose(ratio[period < 8192 / 4], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[period > 8192], 8, rtol=1e-6)
    between = ratio[(period > 8192 / 4) & (period < 8192)]
    assert between.size and (between > 1).all() and (between < 8).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 7}, "dim: got 7, expected an even number"),
        ({"dim": 8, "base": 0}, "base: got 0, expected a number > 0"),
        ({"dim": 8, "scaling": {"rope_type": "spiral"}}, "scaling: got rope_type 'spiral', expected one of default, linear"),
        ({"dim": 8, "scaling": {"rope_type": "linear"}}, "scaling: got rope_type 'linear' without factor"),
    ],
)
def test_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ejkernel.LlamaRotaryEmbedding(**arguments)
