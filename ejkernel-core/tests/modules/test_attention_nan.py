"""NaN and infinities in visible places reach exactly the rows that see them, forward and backward."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.masks import MaskInfo

BLOCKS = {"block_q": 4, "block_k": 5, "block_q_backward": 5, "block_k_backward": 4}
flash_attention = functools.partial(ejkernel.flash_attention, platform="xla")
LENGTH = 13
SEEN = np.tril(np.ones((LENGTH, LENGTH), bool)) & ~np.tril(np.ones((LENGTH, LENGTH), bool), -6)
SEEN[:, 7] = False
SEEN[9] = False


def arrays() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {"query": (2, LENGTH, 4, 3), "key": (2, LENGTH, 2, 3), "value": (2, LENGTH, 2, 5), "softmax_aux": (4,)}
    shapes["bias"] = (2, 4, LENGTH, LENGTH)
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def rows_and_gradients(given, cotangent, **options):
    """Which rows `[T]` of out and of the gradients of query, and which keys of the gradients of key and value, hold NaN."""
    mask = MaskInfo(dense=SEEN[None, None])
    out, pull = jax.vjp(lambda given: flash_attention(mask_info=mask, **given, **options), given)
    gradients = pull(cotangent)[0]
    found = {"out": out, **gradients}
    return {name: np.isnan(found[name]).any((0, 2, 3)) for name in ("out", "query", "key", "value")}, gradients


@pytest.mark.parametrize(
    "options", ({}, {"cfg": BLOCKS}, {"cfg": BLOCKS, "logits_soft_cap": 3.0, "dropout_prob": 0.0}), ids=str
)
@pytest.mark.parametrize("name", ("query", "key", "value"))
@pytest.mark.parametrize("token", range(LENGTH))
def test_nan_reaches_the_rows_that_see_it(name, token, options):
    given = arrays()
    given[name] = given[name].at[:, token].set(jnp.nan)
    found, _ = rows_and_gradients(given, jnp.ones((2, LENGTH, 4, 5)), **options)
    rows = SEEN[:, token] if name != "query" else (np.arange(LENGTH) == token) & SEEN[token].any()
    assert np.array_equal(found["out"], rows)
    assert np.array_equal(found["query"], rows)
    assert np.array_equal(found["key"], SEEN[rows].any(0))
    assert np.array_equal(found["value"], SEEN[rows].any(0))


@pytest.mark.parametrize("options", ({}, {"cfg": BLOCKS}), ids=str)
@pytest.mark.parametrize("row", (4, 9))
def test_nan_cotangent_reaches_every_gradient_of_its_row(row, options):
    found, gradients = rows_and_gradients(arrays(), jnp.ones((2, LENGTH, 4, 5)).at[:, row, 1].set(jnp.nan), **options)
    rows = (np.arange(LENGTH) == row) & SEEN[row].any()
    assert np.array_equal(found["query"], rows)
    assert np.array_equal(found["key"], SEEN[rows].any(0))
    assert np.array_equal(np.isnan(gradients["softmax_aux"]), [False, bool(rows.any()), False, False])
    assert np.array_equal(np.isnan(gradients["bias"]).any((0, 2, 3)), [False, bool(rows.any()), False, False])


@pytest.mark.parametrize("options", ({}, {"cfg": BLOCKS}, {"logits_soft_cap": 3.0}), ids=str)
def test_nan_in_a_visible_bias(options):
    given = arrays()
    given["bias"] = given["bias"].at[:, 1, 8, 5].set(jnp.nan).at[:, 1, 8, 2].set(jnp.nan).at[:, 1, 9].set(jnp.nan)
    found, _ = rows_and_gradients(given, jnp.ones((2, LENGTH, 4, 5)), **options)
    assert np.array_equal(found["out"], np.arange(LENGTH) == 8)
    assert np.array_equal(found["query"], np.arange(LENGTH) == 8)


def test_a_key_at_minus_infinity_has_no_weight_and_no_gradient():
    query, key, value = jnp.ones((1, 4, 1, 2)), arrays()["key"][:1, :4, :1, :2], arrays()["value"][:1, :4, :1]

    def gradients(key, dense):
        run = functools.partial(flash_attention, mask_info=MaskInfo(dense=dense, causal=True))
        return jax.grad(lambda *given: jnp.sum(jnp.sin(run(*given))), (0, 1, 2))(query, key, value)

    dense = np.ones((1, 1, 4, 4), bool)
    got = gradients(key.at[0, 1, 0, 0].set(-jnp.inf), dense)
    dense[..., 1] = False
    for one, other in zip(got, gradients(key, dense), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_weights_hold_nan_where_it_is_seen_and_nowhere_else():
    given = arrays()
    attention = functools.partial(ejkernel.attention, mask_info=MaskInfo(dense=SEEN[None, None]), platform="xla")
    given["key"] = given["key"].at[:, 7].set(jnp.nan)  # seen by none
    query, key, value = given["query"], given["key"], given["value"]
    gradients = jax.grad(lambda *qk: jnp.sum(jnp.sin(attention(*qk, value)[1])), (0, 1))(query, key)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    weights = np.asarray(attention(query, key.at[:, 3].set(jnp.nan), value)[1])
    rows = SEEN[:, 3]
    assert np.array_equal(np.isnan(weights), np.broadcast_to(SEEN & rows[:, None], weights.shape))
