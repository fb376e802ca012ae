"""Cross entropy with soft targets and class weights, against PyTorch's definitions on logits in full."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from test_losses import TILES, D, V, assert_same, labels, normal

import ejkernel

cross_entropy = functools.partial(ejkernel.fused_cross_entropy, platform="xla")


def soft_expected(logits, p, weights=None, classes=None, smoothing=0.0, cap=None, reduction="mean", labels=None):
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    scale = jnp.ones(logits.shape[:-1]) if weights is None else weights
    classes = jnp.ones(V) if classes is None else classes
    importance = jnp.ones(())
    if labels is not None:
        scale = jnp.where(labels == -100, 0, scale)
        p = jax.nn.one_hot(labels, V)
        importance = classes[jnp.maximum(labels, 0)]
    target = (1 - smoothing) * p + smoothing / V
    loss = -(classes[(None,) * (logits.ndim - 1)] * target * jax.nn.log_softmax(logits)).sum(-1) * scale
    if reduction != "mean":
        return loss if reduction == "none" else loss.sum()
    return loss.sum() / (scale * importance).sum()


def soft_labels(*shape: int) -> jax.Array:
    return jax.nn.softmax(3 * normal(*shape, V, seed=7))


@pytest.mark.parametrize("smoothing", (0.0, 0.2))
@pytest.mark.parametrize("given", ("soft", "soft with classes", "classes"))
@pytest.mark.parametrize("reduction", ("none", "mean", "sum"))
def test_soft_targets_and_class_weights(given, smoothing, reduction):
    hidden, head, bias = normal(3, 5, D), normal(D, V), normal(V)
    weights, classes = normal(3, 5, seed=4) ** 2, normal(V, seed=5) ** 2 if "classes" in given else None
    p, hard = (soft_labels(3, 5), None) if "soft" in given else (None, labels(3, 5))
    options = {"weights": weights, "class_weights": classes, "label_smoothing": smoothing, "reduction": reduction}

    def ours(hidden, head, bias):
        found = cross_entropy(
            targets=hard if p is None else p, hidden=hidden, lm_head_weight=head, lm_head_bias=bias, **options
        )
        return found.loss.sum()

    def transposed(hidden, head, bias):
        found = cross_entropy(
            targets=hard if p is None else p,
            hidden=hidden,
            lm_head_weight=head.T,
            lm_head_bias=bias,
            transpose_head=True,
            cfg=TILES,
            **options,
        )
        return found.loss.sum()

    def from_logits(hidden, head, bias):
        logits = jnp.matmul(hidden, head, precision="highest") + bias[None, None]
        return cross_entropy(logits, hard if p is None else p, **options).loss.sum()

    def plain(hidden, head, bias):
        logits = jnp.matmul(hidden, head, precision="highest") + bias[None, None]
        return soft_expected(logits, p, weights, classes, smoothing, None, reduction, hard).sum()

    wanted = jax.jit(jax.value_and_grad(plain, (0, 1, 2)))(hidden, head, bias)
    for function in (ours, transposed, from_logits):
        assert_same(jax.jit(jax.value_and_grad(function, (0, 1, 2)))(hidden, head, bias), wanted, 5e-5)


def test_soft_targets_of_masked_rows_and_excluded_entries():
    """Rows that do not count may hold NaN; an entry of -inf has no target."""
    logits, p = normal(3, 4, V), soft_labels(3, 4)
    mask = jnp.arange(12).reshape(3, 4) % 3 != 0
    dirty, wrong = jnp.where(mask[..., None], logits, jnp.nan), jnp.where(mask[..., None], p, jnp.nan)
    wanted = soft_expected(logits, p, mask.astype(jnp.float32), cap=20.0)
    found = cross_entropy(dirty, wrong, attention_mask=mask, logit_softcap=20.0)
    assert_same(found.loss, wanted)
    assert found.weight_sum == 8
    d_logits, d_p = jax.grad(lambda *x: cross_entropy(*x, attention_mask=mask).loss, (0, 1))(dirty, wrong)
    assert np.isfinite(d_logits).all() and np.isfinite(d_p).all()
    assert not np.asarray(d_logits[~mask]).any() and not np.asarray(d_p[~mask]).any()
    hidden_entry = logits.at[..., 0].set(-jnp.inf)
    one_hot = jax.nn.one_hot(labels(3, 4, ignored=0) % (V - 1) + 1, V)
    wanted = (jax.nn.logsumexp(logits[..., 1:], -1) - (one_hot * logits).sum(-1)).mean()
    assert_same(cross_entropy(hidden_entry, one_hot).loss, wanted)


def test_soft_targets_agree_with_labels():
    logits, hard = normal(4, 6, V), labels(4, 6, ignored=0)
    soft = jax.nn.one_hot(hard, V)
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 1e-2}):
        assert_same(cross_entropy(logits, soft, **options), cross_entropy(logits, hard, **options))


@pytest.mark.parametrize("split", ("vocabulary", "tokens"))
@pytest.mark.parametrize("given", ("soft", "classes"))
def test_soft_targets_and_class_weights_over_devices(given, split):
    hidden, head, classes = normal(4, 6, D), normal(D, V), normal(V, seed=5) ** 2
    targets = soft_labels(4, 6) if given == "soft" else labels(4, 6)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    rows, entries = (None, "x") if split == "vocabulary" else ("x", None)
    target_spec = P(rows, None, entries) if given == "soft" else P(rows)
    sharding = {
        "mesh": mesh,
        "in_specs": (None, target_spec, None, P(rows), P(None, entries), None, None, P(entries)),
        "out_specs": P(),
    }

    def run(hidden, head, **sharding):
        return cross_entropy(
            targets=targets,
            hidden=hidden,
            lm_head_weight=head,
            class_weights=classes,
            label_smoothing=0.1,
            **sharding,
        ).loss

    got, wanted = (jax.value_and_grad(run, (0, 1))(hidden, head, **options) for options in (sharding, {}))
    assert_same(got, wanted)
    if split == "vocabulary":
        sharding["in_specs"] = (*sharding["in_specs"][:-1], P())
        with pytest.raises(ValueError, match="in_specs: got entries of class_weights split over nothing, expected over"):
            run(hidden, head, **sharding)


SOFT, X, L = soft_labels(2, 3), normal(2, 3, V), labels(2, 3)
SOFT_REFUSED = {
    "shape of soft targets": (
        lambda: cross_entropy(X, SOFT[..., :9]),
        ValueError,
        r"targets: got shape .*\[..., V\], or integer",
    ),
    "complex targets": (
        lambda: cross_entropy(X, L.astype(complex)),
        TypeError,
        "targets: got dtype complex.*, expected integers, or",
    ),
    "ignore_index": (
        lambda: cross_entropy(X, SOFT, ignore_index=0),
        ValueError,
        "ignore_index: got 0, expected its default with soft targets; mask tokens",
    ),
    "classes": (lambda: cross_entropy(X, L, class_weights=jnp.ones(9)), ValueError, r"class_weights: got shape \(9,\)"),
    "integer classes": (lambda: cross_entropy(X, L, class_weights=jnp.ones(V, int)), TypeError, "class_weights: got dtype int"),
    "soft cap": (
        lambda: cross_entropy(targets=SOFT, hidden=X[..., :D], lm_head_weight=normal(D, V), logit_softcap=3.0),
        ValueError,
        "logit_softcap: got 3.0, expected None beside hidden states and soft targets; pass logits=",
    ),
}


@pytest.mark.parametrize("name", SOFT_REFUSED)
def test_soft_targets_that_are_refused(name):
    call, error, message = SOFT_REFUSED[name]
    with pytest.raises(error, match=message):
        call()
