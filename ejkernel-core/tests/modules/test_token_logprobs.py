"""`token_logprobs` against `jax.nn.log_softmax` of all logits in float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from test_losses import TILES, D, V, assert_same, labels, normal, sharded_over, temporary_bytes

import ejkernel

logprobs = functools.partial(ejkernel.token_logprobs, platform="xla")
HIDDEN, HEAD, BIAS, TARGETS = normal(3, 11, D), normal(D, V), normal(V), labels(3, 11)


def plain(logits: Any, targets: Any, temperature: float = 1.0, cap: float | None = None) -> Any:
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    found = jax.nn.log_softmax(logits / temperature)
    found = jnp.take_along_axis(found, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    return jnp.where(targets == -100, 0, found)


def in_float64(arrays: tuple[Any, ...], cotangent: Any, temperature: float = 1.0, cap: float | None = None) -> tuple[Any, Any]:
    """The log-probabilities and their gradients by hidden states, head and bias, or by logits."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(array, np.float64)) for array in arrays]
        cotangent, targets = np.asarray(cotangent, np.float64), jnp.asarray(np.asarray(TARGETS))

        def function(x: Any, head: Any = None, bias: Any = None) -> Any:
            x = x if head is None else jnp.matmul(x, head, precision="highest") + bias[None, None]
            return plain(x, targets, temperature, cap)

        found, pull = jax.vjp(function, *wide)
        return jax.tree.map(np.asarray, (found, pull(jnp.asarray(cotangent))))


@pytest.mark.parametrize("cfg", (None, TILES), ids=("one tile", "tiles"))
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize(("temperature", "cap"), ((1.0, None), (0.7, None), (1.0, 4.0), (1.6, 4.0)))
def test_hidden_states(temperature, cap, transposed, cfg):
    options = {"temperature": temperature, "logit_softcap": cap, "cfg": cfg, "transpose_head": transposed}

    def ours(hidden, head, bias):
        return logprobs(hidden, head.T if transposed else head, TARGETS, lm_head_bias=bias, **options)

    found, pull = jax.vjp(ours, HIDDEN, HEAD, BIAS)
    cotangent = normal(3, 11, seed=9)
    assert found.dtype == jnp.float32
    assert found.shape == (3, 11)
    assert_same((found, pull(cotangent)), in_float64((HIDDEN, HEAD, BIAS), cotangent, temperature, cap), 5e-5)


@pytest.mark.parametrize(("temperature", "cap"), ((1.0, None), (0.7, None), (1.6, 4.0)))
def test_logits(temperature, cap):
    logits, cotangent = 3 * normal(3, 11, V), normal(3, 11, seed=9)
    found, pull = jax.vjp(
        lambda logits: logprobs(logits=logits, targets=TARGETS, temperature=temperature, logit_softcap=cap), logits
    )
    assert_same((found, pull(cotangent)), in_float64((logits,), cotangent, temperature, cap))


def test_narrow_logits_are_divided_in_float32():
    """8 bits of a logit near 30 leave an error of 0.06 after a division in bfloat16."""
    logits = (30 + normal(3, 11, V)).astype(jnp.bfloat16)
    found = logprobs(logits=logits, targets=TARGETS, temperature=0.7)
    assert found.dtype == jnp.float32
    assert_same(found, in_float64((logits.astype(jnp.float32),), np.ones((3, 11)), 0.7)[0])


def test_narrow_hidden_states():
    hidden, head = HIDDEN.astype(jnp.bfloat16), HEAD.astype(jnp.bfloat16)
    found, pull = jax.vjp(lambda hidden, head: logprobs(hidden, head, TARGETS, temperature=0.5), hidden, head)
    wide = tuple(x.astype(jnp.float32) for x in (hidden, head, 0 * BIAS))
    wanted, gradients = in_float64(wide, np.ones((3, 11)), 0.5)
    assert found.dtype == jnp.float32
    assert_same(found, wanted, 5e-5)
    assert_same(pull(jnp.ones((3, 11))), gradients[:2], 3e-2)


def test_float64():
    with jax.enable_x64(True):
        arrays = [jnp.asarray(np.asarray(x, np.float64)) for x in (HIDDEN, HEAD)]
        found = logprobs(*arrays, jnp.asarray(np.asarray(TARGETS)), temperature=0.7)
        assert found.dtype == jnp.float64
    assert_same(found, in_float64((HIDDEN, HEAD, 0 * BIAS), np.ones((3, 11)), 0.7)[0], 1e-12)


def test_minus_the_loss_of_each_token():
    loss = ejkernel.fused_cross_entropy(
        targets=TARGETS, hidden=HIDDEN, lm_head_weight=HEAD, lm_head_bias=BIAS, logit_softcap=4.0, reduction="none"
    ).loss
    found = ejkernel.TokenLogprobs()(HIDDEN, HEAD, TARGETS, lm_head_bias=BIAS, logit_softcap=4.0)
    assert_same(found, -loss, 0)
    assert not np.signbit(np.asarray(found)[TARGETS == -100]).any()


@pytest.mark.parametrize("temperature", (1.0, 0.7))
def test_tokens_that_do_not_count_may_hold_nan(temperature):
    mask, targets = jnp.ones((3, 11), bool).at[2, 6:].set(False), TARGETS.at[1, 1].set(7)
    counts = (targets != 7) & mask

    def pulled(hidden):
        def ours(hidden, head):
            return logprobs(hidden, head, targets, attention_mask=mask, ignore_index=7, temperature=temperature)

        found, pull = jax.vjp(ours, hidden, HEAD)
        return found, pull(jnp.ones_like(found))

    targets = jnp.where(targets == -100, 3, targets)
    counts = counts & (targets != 7)
    dirty = pulled(jnp.where(counts[..., None], HIDDEN, jnp.nan))
    assert_same(dirty, pulled(HIDDEN), 0)
    assert 5 < counts.sum() < 30
    np.testing.assert_array_equal(dirty[0] == 0, ~counts)


@pytest.mark.parametrize("head", (False, True))
def test_traced_temperature(head):
    arrays = (HIDDEN, HEAD) if head else (3 * normal(3, 11, V),)

    def ours(heat, *arrays):
        given = dict(zip(("hidden", "lm_head_weight") if head else ("logits",), arrays, strict=True))
        return logprobs(targets=TARGETS, temperature=heat, **given).sum()

    got = jax.jit(jax.value_and_grad(ours, 1))(0.7, *arrays)
    assert_same(got, jax.value_and_grad(ours, 1)(0.7, *arrays))
    with pytest.raises(TypeError, match=r"^temperature: it has no gradient; pass jax.lax.stop_gradient\(temperature\)"):
        jax.grad(ours)(0.7, *arrays)


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
@pytest.mark.parametrize("temperature", (1.0, 0.7))
def test_vocabulary_and_tokens_over_devices(kind, temperature):
    mesh = sharded_over(kind)
    hidden, head, bias, targets = normal(4, 6, D), normal(V, D), normal(V), labels(4, 6)

    def pulled(**sharded):
        def loss(heat, hidden, head, bias):
            options = {"transpose_head": True, "lm_head_bias": bias, "temperature": heat, "cfg": TILES}
            found = logprobs(hidden, head, targets, **options, **sharded)
            return jnp.sum(jnp.sin(found)), found

        gradient = jax.value_and_grad(loss, (1, 2, 3), has_aux=True)
        static = jax.jit(functools.partial(gradient, temperature))(hidden, head, bias)
        return static, jax.jit(gradient)(temperature, hidden, head, bias)

    specs = (P("dp"), P("tp"), P("dp"), None, P("tp"))
    assert_same(pulled(mesh=mesh, in_specs=specs, out_specs=P("dp")), pulled(), 5e-5)


def test_vocabulary_of_logits_over_devices():
    logits, targets = normal(4, 6, V), labels(4, 6)
    mesh = sharded_over(AxisType.Auto)
    run = jax.shard_map(
        lambda logits, targets: logprobs(logits=logits, targets=targets, vocab_parallel_axis="tp", temperature=0.7),
        mesh=mesh,
        in_specs=(P(None, None, "tp"), P()),
        out_specs=P(),
    )
    found = jax.jit(run)(logits, targets)
    assert_same(found, plain(logits, targets, 0.7))
    specs = {"in_specs": (None, None, P("dp"), P("dp", None, "tp")), "out_specs": P("dp")}
    assert_same(logprobs(logits=logits, targets=targets, temperature=0.7, mesh=mesh, **specs), found)


def test_batched_arguments():
    """`jax.vmap` of all, and of the targets alone: several continuations of one prompt."""
    several = jnp.stack([TARGETS, (TARGETS + 1) % V])
    found = jax.vmap(lambda targets: logprobs(HIDDEN, HEAD, targets))(several)
    assert_same(found, jnp.stack([logprobs(HIDDEN, HEAD, targets) for targets in several]))
    assert_same(jax.vmap(lambda *given: logprobs(given[0], HEAD, given[1]))(HIDDEN, TARGETS), logprobs(HIDDEN, HEAD, TARGETS))


def test_logits_are_never_all_there():
    tokens, vocabulary, width = 2048, 8192, 32
    targets, advantage = jnp.zeros((tokens,), jnp.int32), jnp.linspace(-1, 1, tokens)

    def loss(hidden, head):
        found = logprobs(hidden, head, targets, temperature=0.7)
        return -jnp.mean(jnp.exp(found - jax.lax.stop_gradient(found)) * advantage)

    used = temporary_bytes(jax.grad(loss, (0, 1)), (tokens, width), (width, vocabulary))
    assert used < 4 * tokens * vocabulary / 2


H, W, X, L = (np.asarray(x) for x in (HIDDEN, HEAD, normal(3, 11, V), np.ones((3, 11), np.int32)))
REFUSED = {
    "no targets": (lambda: logprobs(H, W), ValueError, r"^targets: got None, expected integers \[...\]"),
    "soft targets": (lambda: logprobs(logits=X, targets=X), TypeError, "^targets: got dtype float32, expected integers"),
    "nothing": (lambda: logprobs(targets=L), ValueError, "^logits: got neither logits nor hidden"),
    "both": (lambda: logprobs(H, W, L, logits=X), ValueError, "^logits: got both logits and hidden"),
    "no head": (lambda: logprobs(H, None, L), ValueError, "^lm_head_weight: got None"),
    "a head of logits": (lambda: logprobs(None, W, L, logits=X), ValueError, "^lm_head_weight: got an array"),
    "a bias of logits": (lambda: logprobs(targets=L, logits=X, lm_head_bias=W[0]), ValueError, "^lm_head_bias: got an array"),
    "another bias": (lambda: logprobs(H, W, L, lm_head_bias=W[0, 1:]), ValueError, r"^lm_head_bias: got shape \(39,\)"),
    "another head": (lambda: logprobs(H, W.T, L), ValueError, r"^lm_head_weight: got shape \(40, 12\)"),
    "targets of another shape": (lambda: logprobs(H, W, L[:1]), ValueError, r"targets: got shape \(1, 11\)"),
    "another mask": (lambda: logprobs(H, W, L, attention_mask=L[0]), ValueError, r"^attention_mask: got shape \(11,\)"),
    "a target outside": (lambda: logprobs(H, W, L * V), ValueError, r"^targets: got 40, expected values in \[0, 39\]"),
    "an index": (lambda: logprobs(H, W, L, ignore_index=1.0), TypeError, "^ignore_index: got 1.0, expected an int"),
    "a flag": (lambda: logprobs(H, W, L, transpose_head=1), TypeError, "^transpose_head: got 1, expected True or False"),
    "no heat": (lambda: logprobs(H, W, L, temperature=0), ValueError, "^temperature: got 0.0, expected a value > 0"),
    "cold": (lambda: logprobs(H, W, L, temperature=-1.0), ValueError, "^temperature: got -1.0, expected a value > 0"),
    "infinite heat": (lambda: logprobs(H, W, L, temperature=np.inf), ValueError, "^temperature: got inf"),
    "None as heat": (lambda: logprobs(H, W, L, temperature=None), TypeError, "^temperature: got None, expected a number"),
    "a cap": (lambda: logprobs(H, W, L, logit_softcap=-1.0, temperature=2.0), ValueError, "^logit_softcap: got -1.0"),
    "a traced temperature beside a cap": (
        lambda: jax.jit(lambda heat: logprobs(H, W, L, logit_softcap=4.0, temperature=heat))(2.0),
        TypeError,
        "^temperature: got a traced value, expected a number known when the program is built, beside logit_softcap",
    ),
    "an axis": (lambda: logprobs(H, W, L, vocab_parallel_axis="tp"), ValueError, r"^vocab_parallel_axis: got \('tp',\)"),
    "specs alone": (lambda: logprobs(H, W, L, in_specs=(P(),)), ValueError, "in_specs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
