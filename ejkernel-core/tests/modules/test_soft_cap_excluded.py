"""A soft cap leaves excluded what a logit or a bias of -inf excludes."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import ejkernel

CAP = 2.0
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((4, 6)), jnp.float32)
HEAD = jnp.asarray(RNG.standard_normal((6, 16)), jnp.float32)
LABELS = jnp.asarray([0, 3, 5, 6])
OUT = jnp.arange(16) >= 8
BIAS = jnp.where(OUT, -jnp.inf, 0.0)


def logits_of(x: Any) -> Any:
    return jnp.where(OUT[None], -jnp.inf, jnp.matmul(x, HEAD, precision="highest"))


def loss_of(x: Any) -> Any:
    """Over the eight entries that are left."""
    logits = CAP * jnp.tanh(jnp.matmul(x, HEAD[:, :8], precision="highest") / CAP)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), LABELS[:, None], axis=1).mean()


def vocabulary_parallel(**arrays: Any) -> Any:
    """On two devices, one of which has nothing that can be chosen."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    specs = {"logits": (None, "tp"), "hidden": (), "weight": (None, "tp"), "bias": ("tp",), "labels": ()}

    def run(given: dict[str, Any]) -> Any:
        options = {"logit_softcap": CAP, "vocab_parallel_axis": "tp"}
        if "logits" in given:
            return ejkernel.fused_cross_entropy(given["logits"], given["labels"], **options).loss
        hidden = {"hidden": given["hidden"], "lm_head_weight": given["weight"], "lm_head_bias": given["bias"]}
        return ejkernel.fused_cross_entropy(None, given["labels"], **hidden, **options).loss

    given = {**arrays, "labels": LABELS}
    split = {name: PartitionSpec(*specs[name]) for name in given}
    return jax.shard_map(run, mesh=mesh, in_specs=(split,), out_specs=PartitionSpec())(given)


FORMS = {
    "logits": lambda x: ejkernel.fused_cross_entropy(logits_of(x), LABELS, logit_softcap=CAP).loss,
    "hidden": lambda x: (
        ejkernel.fused_cross_entropy(
            None, LABELS, hidden=x, lm_head_weight=HEAD, lm_head_bias=BIAS, logit_softcap=CAP, precision="highest"
        ).loss
    ),
    "log probabilities": lambda x: -ejkernel.token_logprobs(logits=logits_of(x), targets=LABELS, logit_softcap=CAP).mean(),
    "soft targets": lambda x: ejkernel.fused_cross_entropy(logits_of(x), jax.nn.one_hot(LABELS, 16), logit_softcap=CAP).loss,
    "split logits": lambda x: vocabulary_parallel(logits=logits_of(x)),
    "split head": lambda x: vocabulary_parallel(hidden=x, weight=HEAD, bias=BIAS),
}


@pytest.mark.parametrize("form", FORMS)
def test_losses(form: str) -> None:
    """Values and gradients are those of the vocabulary without what is excluded."""
    found, gradient = jax.jit(jax.value_and_grad(FORMS[form]))(X)
    expected, slope = jax.value_and_grad(loss_of)(X)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=2e-4, atol=1e-6)


def test_two_entries_that_are_equally_likely() -> None:
    found = ejkernel.fused_cross_entropy(jnp.array([[0.0, 0.0, -jnp.inf]]), jnp.array([0]), logit_softcap=CAP)
    assert abs(float(found.loss) - math.log(2)) < 1e-6


@pytest.mark.parametrize("form", ["attention", "flash_attention"])
def test_attention(form: str) -> None:
    """A bias of -inf hides its key, whose gradients are 0, and a row that it hides whole gives 0."""
    query, key, value = (jnp.asarray(RNG.standard_normal((1, 5, 2, 8)), jnp.float32) for _ in range(3))
    bias = jnp.zeros((1, 2, 5, 5)).at[..., 3:].set(-jnp.inf).at[:, :, 1].set(-jnp.inf)
    run = functools.partial(getattr(ejkernel, form), logits_soft_cap=CAP, softmax_scale=1.0)

    def out(query: Any, key: Any, value: Any, bias: Any) -> Any:
        found = run(query, key, value, bias=bias)
        return found[0] if isinstance(found, tuple) else found

    found, pull = jax.vjp(out, query, key, value, bias)
    logits = CAP * jnp.tanh(jnp.einsum("bthd,bshd->bhts", query, key[:, :3], precision="highest") / CAP)
    expected = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), value[:, :3], precision="highest")
    np.testing.assert_allclose(found, expected.at[:, 1].set(0), rtol=1e-4, atol=1e-5)
    gradients = pull(jnp.ones_like(found))
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert not np.any(gradients[1][:, 3:]) and not np.any(gradients[2][:, 3:]) and not np.any(gradients[3][..., 3:])
    if form == "attention":
        weights = run(query, key, value, bias=bias)[1]
        np.testing.assert_allclose(weights[..., :3].at[:, :, 1].set(0), jax.nn.softmax(logits).at[:, :, 1].set(0), rtol=1e-4)
        assert not np.any(weights[..., 3:]) and not np.any(weights[:, :, 1])
