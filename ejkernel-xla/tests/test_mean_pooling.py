"""`mean_pooling` on XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from against_reference import cases_named, check_case, check_second_order, check_vmap, problems

import ejkernel


@problems("mean_pooling")
def test_against_reference(case: Any, dtype: str) -> None:
    check_case("mean_pooling", case, dtype)


@cases_named("mean_pooling", "heads", "no-heads", "packed", "packed-empty-sequences")
def test_vmap(case: Any) -> None:
    check_vmap("mean_pooling", case)


def test_second_order_and_jit() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 5, 2, 2))
    check_second_order(
        lambda x: ejkernel.mean_pooling(x, jnp.array([0, 2, 2, 5])),
        lambda x: jnp.stack([x[0, :2].mean(0), jnp.zeros((2, 2)), x[0, 2:].mean(0)]),
        x,
    )


def test_traced_lengths_share_one_program() -> None:
    traces = []

    @jax.jit
    def pooled(x: Any, cu_seqlens: Any) -> Any:
        traces.append(1)
        return ejkernel.mean_pooling(x, cu_seqlens)

    x = jnp.arange(6, dtype=jnp.float32)[None, :, None]
    np.testing.assert_allclose(pooled(x, jnp.array([0, 2, 6])), [[0.5], [3.5]])
    np.testing.assert_allclose(pooled(x, jnp.array([0, 6, 6])), [[2.5], [0.0]])
    np.testing.assert_allclose(pooled(x, jnp.array([0, 5, 5])), [[2.0], [0.0]])
    assert len(traces) == 1


def test_sums_are_kept_in_float32() -> None:
    x = jnp.ones((1, 4096, 1), jnp.bfloat16)
    np.testing.assert_array_equal(ejkernel.mean_pooling(x), np.ones((1, 1)))
    np.testing.assert_array_equal(ejkernel.mean_pooling(x, jnp.array([0, 4095, 4096])), np.ones((2, 1)))
