"""`mean_pooling` on XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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


@pytest.mark.parametrize("kind", [bool, np.int32, np.float32])
@pytest.mark.parametrize("heads", [(), (3,)])
def test_tokens_of_padding_do_not_count(heads: tuple[int, ...], kind: Any) -> None:
    """Padding stands anywhere and holds NaN; a row of nothing else gives 0; gradients of padding are 0."""
    rng = np.random.default_rng(0)
    x, mask = rng.standard_normal((3, 7, *heads, 4)).astype(np.float32), rng.random((3, 7)) < 0.6
    mask[1] = False
    x[~mask] = np.nan
    wanted = np.stack([row[kept].mean(0) if kept.any() else np.zeros(row.shape[1:]) for row, kept in zip(x, mask, strict=True)])
    got = ejkernel.mean_pooling(x, attention_mask=mask.astype(kind))
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    gradient = jax.grad(lambda x: ejkernel.mean_pooling(x, attention_mask=mask.astype(kind)).sum())(jnp.asarray(x))
    share = np.where(mask, 1 / np.maximum(mask.sum(1, keepdims=True), 1), 0)
    np.testing.assert_allclose(gradient, np.broadcast_to(share.reshape(3, 7, *[1] * (x.ndim - 2)), x.shape), rtol=1e-6)


def test_masked_means_are_rounded_once() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 33, 8)), jnp.bfloat16)
    mask = np.arange(33)[None] < np.array([[1], [7], [20], [33]])
    wanted = np.stack([np.asarray(row, np.float64)[kept].mean(0) for row, kept in zip(x, mask, strict=True)])
    got = ejkernel.mean_pooling(x, attention_mask=mask)
    assert got.dtype == jnp.bfloat16
    assert np.all(np.abs(np.asarray(got, np.float64) - wanted) <= 2.0**-8 * np.abs(wanted) + 1e-6)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"attention_mask": np.ones((2, 3))},
            ValueError,
            r"attention_mask: got shape \(2, 3\), expected \(2, 5\) = \[B, T\] as x",
        ),
        ({"attention_mask": np.ones((2, 5), np.complex64)}, TypeError, "attention_mask: got dtype complex64, expected bool"),
        ({"attention_mask": True}, ValueError, r"attention_mask: got shape \(\), expected \(2, 5\)"),
        (
            {"attention_mask": np.ones((2, 5)), "cu_seqlens": np.array([0, 5])},
            ValueError,
            "attention_mask: got an array, expected None beside cu_seqlens; pack the tokens that count",
        ),
    ],
)
def test_masks_that_are_refused(changed: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ejkernel.mean_pooling(np.ones((2, 5, 4), np.float32), **changed)
