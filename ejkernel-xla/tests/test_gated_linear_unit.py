"""`gated_linear_unit` on XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_reference import cases_named, check_case, check_second_order, check_vmap, problems

import ejkernel

GATE, UP = (jax.random.normal(jax.random.key(seed), (6, 20)) for seed in (0, 1))
PLAIN = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
}


@problems("gated_linear_unit")
def test_against_reference(case: Any, dtype: str) -> None:
    check_case("gated_linear_unit", case, dtype)


@cases_named("gated_linear_unit", "silu", "packed", "gpt-oss")
def test_vmap(case: Any) -> None:
    check_vmap("gated_linear_unit", case)


@pytest.mark.parametrize("activation", PLAIN)
def test_activations_are_those_of_jax(activation: Any) -> None:
    got = ejkernel.gated_linear_unit(GATE, UP, activation=activation)
    np.testing.assert_allclose(got, PLAIN[activation](GATE) * UP, rtol=1e-5, atol=1e-6)
    packed = jnp.concatenate([GATE, UP], axis=-1)
    np.testing.assert_array_equal(got, ejkernel.gated_linear_unit(packed, activation=activation))


def test_options_of_gpt_oss() -> None:
    stored = 4 * jax.random.normal(jax.random.key(2), (6, 40))
    gate, up = jnp.minimum(stored[..., ::2], 7), jnp.clip(stored[..., 1::2], -7, 7)
    got = ejkernel.gated_linear_unit(stored[..., ::2], stored[..., 1::2], alpha=1.702, limit=7.0, up_offset=1.0)
    np.testing.assert_allclose(got, gate * jax.nn.sigmoid(1.702 * gate) * (up + 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_are_rounded_once_and_do_not_overflow_inside(dtype: str) -> None:
    gate, up = jnp.asarray([300.0, 1e4, -3.0], dtype), jnp.asarray([200.0, 2.0**-10, 3.0], dtype)
    got = ejkernel.gated_linear_unit(gate, up, activation="gelu_tanh")  # the cube of the first is beyond float16
    exact = jax.nn.gelu(gate.astype(jnp.float32), approximate=True) * up.astype(jnp.float32)
    np.testing.assert_array_equal(got, exact.astype(dtype))


def test_backward_keeps_nothing_but_its_inputs() -> None:
    gate, up = GATE.astype(jnp.bfloat16), UP.astype(jnp.bfloat16)
    _, pull = jax.vjp(jax.jit(lambda *arrays: ejkernel.gated_linear_unit(*arrays)), gate, up)
    kept = [leaf for leaf in jax.tree.leaves(pull) if getattr(leaf, "shape", ()) == gate.shape]
    assert kept and all(leaf.dtype == jnp.bfloat16 for leaf in kept)


def test_class_form_and_second_order() -> None:
    np.testing.assert_array_equal(ejkernel.GatedLinearUnit()(GATE, UP), ejkernel.gated_linear_unit(GATE, UP))
    check_second_order(ejkernel.gated_linear_unit, lambda gate, up: jax.nn.silu(gate) * up, GATE[:2, :5], UP[:2, :5])
