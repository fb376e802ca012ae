"""`moe_route`, `moe_permute`, `moe_unpermute` on XLA, alone and together; the losses that balance a router."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_reference import check_case, problems

import ejkernel


@problems("moe_route")
def test_route_against_reference(case: Any, dtype: str) -> None:
    check_case("moe_route", case, dtype)


@problems("moe_permute")
def test_permute_against_reference(case: Any, dtype: str) -> None:
    check_case("moe_permute", case, dtype)


@problems("moe_unpermute")
def test_unpermute_against_reference(case: Any, dtype: str) -> None:
    check_case("moe_unpermute", case, dtype)


def _normal(*shape: int, seed: int = 0) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def test_groups_and_bias_choose_as_written_out() -> None:
    """Two groups of two; the bias lifts expert 0, whose weight stays its score."""
    logits = jnp.array([[-1.0, 0.0, 2.0, 1.0]])
    bias = jnp.array([2.0, 0.0, 0.0, 0.0])
    weights, experts = ejkernel.moe_route(logits, 2, bias=bias, scoring="sigmoid", num_groups=2, top_groups=1, scale=3.0)
    scores = 1 / (1 + np.exp([1.0, 0.0]))
    np.testing.assert_array_equal(experts, [[0, 1]])
    np.testing.assert_allclose(weights[0], 3 * scores / scores.sum(), rtol=1e-6)
    np.testing.assert_array_equal(ejkernel.moe_route(logits, 2, num_groups=2, top_groups=1).experts, [[2, 3]])


def test_saturated_scores_are_told_apart_by_their_logits() -> None:
    assert ejkernel.moe_route(jnp.array([[40.0, 41.0]]), 1, scoring="sigmoid").experts[0, 0] == 1
    assert ejkernel.moe_route(jnp.array([[0.0, -0.0, -200.0, -199.0]]), 4).experts.tolist() == [[0, 1, 3, 2]]


def test_bias_has_no_gradient() -> None:
    def loss(bias: Any) -> Any:
        return jnp.sum(ejkernel.moe_route(_normal(5, 8), 2, bias=bias, scoring="sigmoid").weights ** 2)

    np.testing.assert_array_equal(jax.grad(loss)(jnp.zeros(8)), 0)


def test_unpermute_undoes_permute() -> None:
    x = _normal(50, 6)
    weights, experts = ejkernel.moe_route(_normal(50, 8, seed=1), 3)
    rows, sizes, positions = ejkernel.moe_permute(x, experts, 8)
    np.testing.assert_array_equal(np.sort(positions.reshape(-1)), np.arange(150))
    ends = np.cumsum(sizes)
    for expert in range(8):
        tokens = np.argwhere(np.asarray(experts) == expert)[:, 0]
        np.testing.assert_array_equal(rows[ends[expert] - sizes[expert] : ends[expert]], x[tokens])
    np.testing.assert_allclose(ejkernel.moe_unpermute(rows, positions, weights), x, atol=1e-6)
    np.testing.assert_allclose(ejkernel.moe_unpermute(rows, positions), 3 * x, atol=1e-6)


def test_shards_of_experts_add_up() -> None:
    x = _normal(20, 6)
    weights, experts = ejkernel.moe_route(_normal(20, 8, seed=1), 3)
    total = jnp.zeros_like(x)
    for first in (0, 2, 6):
        held = {0: 2, 2: 4, 6: 2}[first]
        rows, _, positions = ejkernel.moe_permute(x, experts - first, held)
        total += ejkernel.moe_unpermute(rows, positions, weights)
    np.testing.assert_allclose(total, x, atol=1e-6)


def test_gradients_scatter_no_rows() -> None:
    """What is scattered are the int32 positions of the copies, nothing of width D."""
    experts = ejkernel.moe_route(_normal(16, 4), 2).experts

    def loss(x: Any, weights: Any) -> Any:
        rows, _, positions = ejkernel.moe_permute(x, experts, 4)
        return jnp.sum(ejkernel.moe_unpermute(rows**2, positions, weights))

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(_normal(16, 96), _normal(16, 2)).as_text()
    scatters = re.findall(r'"stablehlo\.scatter"[\s\S]*?-> (tensor<[^>]*>)', text)
    assert scatters and all(found.endswith("xi32>") for found in scatters), scatters


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_load_balancing_loss(scoring: Any) -> None:
    logits = _normal(30, 6)
    experts = ejkernel.moe_route(logits, 2, scoring=scoring).experts
    scores = np.asarray(jax.nn.softmax(logits) if scoring == "softmax" else jax.nn.sigmoid(logits), np.float64)
    scores /= scores.sum(axis=1, keepdims=True)
    frequency = np.bincount(np.asarray(experts).reshape(-1), minlength=6) / 30
    loss = ejkernel.moe_load_balancing_loss(logits, experts, scoring=scoring)
    np.testing.assert_allclose(loss, 6 * (frequency * scores.mean(axis=0)).sum(), rtol=1e-5)
    even = ejkernel.moe_load_balancing_loss(jnp.zeros((3, 6)), jnp.arange(6).reshape(3, 2), scoring=scoring)
    np.testing.assert_allclose(even, 2.0, rtol=1e-6)


def test_losses_leave_out_padding() -> None:
    logits = _normal(12, 6)
    padded = jnp.concatenate([logits, jnp.full((3, 6), -jnp.inf), jnp.full((2, 6), jnp.nan)])
    where = jnp.arange(17) < 15
    experts = ejkernel.moe_route(padded, 2).experts

    def loss(logits: Any, experts: Any, where: Any) -> Any:
        return ejkernel.moe_load_balancing_loss(logits, experts, where=where) + ejkernel.moe_z_loss(logits, where=where)

    value, grad = jax.value_and_grad(loss)(padded, experts, where)
    expected, right = jax.value_and_grad(loss)(logits, experts[:12], None)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(grad[:12], right, rtol=1e-5, atol=1e-8)
    np.testing.assert_array_equal(grad[12:], 0)
    np.testing.assert_allclose(
        ejkernel.moe_z_loss(logits), np.mean(np.log(np.exp(np.asarray(logits, np.float64)).sum(axis=1)) ** 2), rtol=1e-5
    )


def test_losses_refuse_what_does_not_fit() -> None:
    logits, experts = _normal(4, 6), jnp.zeros((4, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"where: got shape \(3,\), expected \(4,\) = \[T\]"):
        ejkernel.moe_z_loss(logits, where=jnp.ones(3, bool))
    with pytest.raises(TypeError, match="where: got dtype int32, expected bool"):
        ejkernel.moe_z_loss(logits, where=jnp.ones(4, jnp.int32))
    with pytest.raises(ValueError, match="scoring: got 'relu'"):
        ejkernel.moe_load_balancing_loss(logits, experts, scoring="relu")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"experts: got shape \(3, 2\), expected \(4, 2\)"):
        ejkernel.moe_load_balancing_loss(logits, experts[:3])
