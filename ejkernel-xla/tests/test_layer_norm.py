"""`layer_norm` and `rms_norm` on XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_reference import cases_named, check_case, check_second_order, check_vmap, problems

import ejkernel

NAMES = ("layer_norm", "rms_norm")


@pytest.mark.parametrize("name", NAMES)
@problems("layer_norm")
def test_against_reference(name: str, case: Any, dtype: str) -> None:
    check_case(name, case, dtype)


@pytest.mark.parametrize("name", NAMES)
@cases_named("layer_norm", "scale-offset", "middle-axis", "one-axis")
def test_vmap(name: str, case: Any) -> None:
    check_vmap(name, case)


@pytest.mark.parametrize("name", NAMES)
def test_second_order_and_jit(name: str) -> None:
    def plain(x: Any, scale: Any, offset: Any) -> Any:
        centred = x - jnp.mean(x, -1, keepdims=True) if name == "layer_norm" else x
        return centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-3) * scale[None] + offset[None]

    keys = jax.random.split(jax.random.key(0), 3)
    arrays = jax.random.normal(keys[0], (3, 5)), jax.random.normal(keys[1], (5,)), jax.random.normal(keys[2], (5,))
    function = getattr(ejkernel, name)
    check_second_order(lambda x, scale, offset: function(x, scale, offset, epsilon=1e-3), plain, *arrays)


def test_variance_does_not_cancel_far_from_zero() -> None:
    x = 1e4 + jnp.arange(64, dtype=jnp.float32)
    wide = np.asarray(x, np.float64)
    expected = (wide - wide.mean()) / np.sqrt(wide.var() + 1e-6)
    np.testing.assert_allclose(ejkernel.layer_norm(x, platform="xla"), expected, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_float64_statistics_are_kept_in_float64(name: str) -> None:
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(0), (2, 16), jnp.float64)
        function = getattr(ejkernel, name)
        gradient = jax.grad(lambda x: jnp.sum(function(x, platform="xla") ** 3))(x)
        step = 1e-5 * jax.random.normal(jax.random.key(1), x.shape, jnp.float64)
        values = [float(jnp.sum(function(x + s * step, platform="xla") ** 3)) for s in (1, -1)]
        assert gradient.dtype == jnp.float64
        assert abs((values[0] - values[1]) / 2 - float(jnp.vdot(gradient, step))) < 1e-10 * abs(values[0])
