"""`softmax` on XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_reference import cases_named, check_case, check_second_order, check_vmap, problems

import ejkernel


@problems("softmax")
def test_against_reference(case: Any, dtype: str) -> None:
    check_case("softmax", case, dtype)


@cases_named("softmax", "scale", "where", "where-middle", "two-axes", "all-axes", "one-axis")
def test_vmap(case: Any) -> None:
    check_vmap("softmax", case)


def test_second_order_and_jit() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 5))
    where = jnp.arange(5)[None] < jnp.array([5, 3, 1])[:, None]
    check_second_order(lambda x: ejkernel.softmax(x, where=where, scale=0.5), lambda x: jax.nn.softmax(0.5 * x, where=where), x)


@pytest.mark.parametrize("custom_gradients", [True, False])
def test_nothing_at_masked_places_reaches_the_gradient(custom_gradients: bool) -> None:
    x = jnp.array([[1.0, jnp.nan, 2.0], [jnp.inf, jnp.nan, -jnp.inf]])
    where = jnp.array([[True, False, True], [False, False, False]])
    with ejkernel.use("xla", custom_gradients=custom_gradients):
        out, pull = jax.vjp(lambda x: ejkernel.softmax(x, where=where), x)
        (gradient,) = pull(jnp.array([[1.0, jnp.nan if custom_gradients else 0.0, 0.0], [1.0, 1.0, 1.0]]))
    high = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(out, [[1 - high, 0, high], [0, 0, 0]], rtol=1e-6)
    slope = high * (1 - high)
    np.testing.assert_allclose(gradient, [[slope, 0, -slope], [0, 0, 0]], rtol=1e-5)
