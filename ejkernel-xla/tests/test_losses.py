"""Losses over a vocabulary: tiles, memory, meshes and edge rules, against plain JAX."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import ejkernel

V, D = 40, 12
TILES = {"block_rows": 7, "block_vocabulary": 9}
cross_entropy = functools.partial(ejkernel.fused_cross_entropy, platform="xla")
divergence = functools.partial(ejkernel.fused_kl_divergence, platform="xla")


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), jnp.float32)


def labels(*shape: int, ignored: int = 3) -> jax.Array:
    found = np.random.default_rng(1).integers(0, V, shape)
    found.ravel()[:ignored] = -100
    return jnp.asarray(found)


def expected(logits, targets, weights=None, smoothing=0.0, z_loss=0.0, cap=None, reduction="mean"):
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    one = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    loss = (1 - smoothing) * (lse - one) + smoothing * (lse - logits.mean(-1)) + z_loss * lse**2
    scale = jnp.where(targets == -100, 0, 1.0 if weights is None else weights)
    loss = jnp.where(scale == 0, 0, loss) * scale
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.sum() / scale.sum()


def assert_same(got, wanted, tolerance: float = 2e-5):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reduction", ("none", "mean", "sum"))
@pytest.mark.parametrize("cfg", (None, TILES), ids=("one tile", "tiles"))
def test_cross_entropy_of_hidden_states(cfg, reduction):
    hidden, head, bias, targets, weights = normal(3, 11, D), normal(D, V), normal(V), labels(3, 11), normal(3, 11, seed=4) ** 2

    def ours(hidden, head, bias):
        return cross_entropy(
            targets=targets,
            weights=weights,
            hidden=hidden,
            lm_head_weight=head,
            lm_head_bias=bias,
            label_smoothing=0.1,
            z_loss=1e-2,
            logit_softcap=4.0,
            reduction=reduction,
            cfg=cfg,
        ).loss

    def plain(hidden, head, bias):
        logits = jnp.matmul(hidden, head, precision="highest") + bias[None, None]
        return expected(logits, targets, weights, 0.1, 1e-2, 4.0, reduction)

    def pulled(function):
        return jax.vjp(function, hidden, head, bias)

    (got, pull), (wanted, pull_plain) = pulled(ours), pulled(plain)
    assert_same(got, wanted)
    assert_same(pull(jnp.sin(got)), pull_plain(jnp.sin(wanted)), 5e-5)


def test_cross_entropy_of_logits_and_its_parts():
    logits, targets = normal(4, 6, V), labels(4, 6)
    found = cross_entropy(logits, targets, z_loss=0.5)
    without = cross_entropy(logits, targets)
    assert found.weight_sum == 21
    assert_same(found.loss - found.z_loss, without.loss)
    assert without.z_loss == 0
    assert_same(without.loss, expected(logits, targets))
    form = ejkernel.FusedCrossEntropy()(logits, targets)
    assert form.loss == without.loss
    assert_same(ejkernel.fused_cross_entropy(logits[0, 0], targets[1, 0]).loss, expected(logits[0, 0], targets[1, 0]))


@pytest.mark.parametrize("head", (False, True))
@pytest.mark.parametrize("reduction", ("none", "mean"))
def test_float64(head, reduction):
    """Statistics and losses are as wide as what they are of."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (normal(3, D), normal(D, V), normal(V, D).T)]
        hidden, matrix, other = wide
        logits, targets = hidden @ matrix, jnp.array([3, 0, -100])
        student = {"student_hidden": hidden, "student_head": matrix} if head else {"student_logits": logits}
        given = {"hidden": hidden, "lm_head_weight": matrix} if head else {"logits": logits}
        found = cross_entropy(targets=targets, z_loss=0.1, label_smoothing=0.1, reduction=reduction, **given).loss
        assert_same(found, expected(logits, targets, None, 0.1, 0.1, reduction=reduction), 1e-12)
        found = divergence(**student, teacher_logits=hidden @ other, reduction=reduction).loss
        assert_same(found.mean(), kl_expected(logits, hidden @ other, "forward", 1.0), 1e-12)


def test_small_losses_are_not_lost_in_the_log_sum():
    """A label that is all but certain: the loss is exp(-30), far below the spacing of float32 at the logits' size."""
    logits = jnp.array([[1000.0, 970.0]])
    assert cross_entropy(logits, jnp.array([0]), reduction="none").loss[0] < 1e-12
    assert cross_entropy(logits, jnp.array([1]), reduction="none").loss[0] == 30


@pytest.mark.parametrize("head", (False, True))
def test_no_token_counts(head):
    targets = jnp.full((2, 5), -100)
    x, matrix = jnp.full((2, 5, D), jnp.nan), normal(D, V)

    def loss(x, matrix):
        if head:
            return cross_entropy(targets=targets, hidden=x, lm_head_weight=matrix, z_loss=1.0, label_smoothing=0.2).loss
        return cross_entropy(x, targets, z_loss=1.0, label_smoothing=0.2).loss

    value, gradients = jax.value_and_grad(loss, (0, 1))(x, matrix)
    assert value == 0
    assert all(not np.asarray(gradient).any() for gradient in gradients)


def test_tokens_that_do_not_count_may_hold_nan():
    hidden, head = normal(2, 6, D), normal(D, V)
    targets, weights = labels(2, 6, ignored=2), jnp.ones((2, 6)).at[1, 1].set(0)
    mask = jnp.ones((2, 6), int).at[1, 4:].set(0)
    counts = (targets != -100) & (weights != 0) & (mask != 0)

    def pulled(hidden):
        def loss(hidden, head):
            return cross_entropy(
                targets=targets, weights=weights, hidden=hidden, lm_head_weight=head, attention_mask=mask, label_smoothing=0.1
            ).loss

        return jax.value_and_grad(loss, (0, 1))(hidden, head)

    dirty = pulled(jnp.where(counts[..., None], hidden, jnp.nan))
    assert_same(dirty, pulled(hidden), 0)
    assert counts.sum() == 7


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint32])
def test_labels_of_any_integer_type(dtype):
    """Neither a vocabulary of 300 nor -100 fits into a byte; in one of uint8, -100 would be 156."""
    logits, targets = normal(3, 300), np.array([120, 56, 127] if dtype == np.int8 else [120, 156, 255], dtype)
    got, wanted = (cross_entropy(logits, one, reduction="none") for one in (targets, targets.astype(np.int32)))
    np.testing.assert_array_equal(got.loss, wanted.loss)
    assert got.weight_sum == 3


def test_a_label_outside_of_the_vocabulary():
    logits = normal(3, V)
    targets = jnp.array([1, V, -5])
    with pytest.raises(ValueError, match=r"targets: got 40, expected values in \[0, 39\] or ignore_index = -100"):
        cross_entropy(logits, targets)
    found = jax.jit(lambda targets: cross_entropy(logits, targets))(targets)
    assert found.weight_sum == 1
    assert_same(found.loss, cross_entropy(logits[:1], targets[:1]).loss)


def sharded_over(kind: AxisType) -> jax.sharding.Mesh:
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    return jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(kind,) * 2)


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
@pytest.mark.parametrize("reduction", ("none", "mean"))
def test_vocabulary_and_tokens_over_devices(kind, reduction):
    hidden, head, bias, targets = normal(4, 6, D), normal(V, D), normal(V), labels(4, 6)
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "reduction": reduction, "transpose_head": True, "targets": targets}

    def pulled(**sharded):
        def loss(hidden, head, bias):
            found = cross_entropy(hidden=hidden, lm_head_weight=head, lm_head_bias=bias, cfg=TILES, **options, **sharded)
            return jnp.sum(jnp.sin(found.loss)), found

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(hidden, head, bias)

    specs = (None, P("dp"), None, P("dp"), P("tp"), P("tp"))
    out = P("dp") if reduction == "none" else P()
    assert_same(pulled(mesh=sharded_over(kind), in_specs=specs, out_specs=out), pulled())


def test_vocabulary_of_logits_over_devices():
    mesh = sharded_over(AxisType.Auto)
    logits, targets = normal(4, 6, V), labels(4, 6)
    run = jax.shard_map(
        lambda logits, targets: cross_entropy(logits, targets, vocab_parallel_axis="tp", label_smoothing=0.1).loss,
        mesh=mesh,
        in_specs=(P(None, None, "tp"), P()),
        out_specs=P(),
    )
    got = jax.jit(jax.value_and_grad(run))(logits, targets)
    assert_same(got, jax.value_and_grad(lambda x: expected(x, targets, None, 0.1))(logits))
    text = jax.jit(jax.grad(run)).lower(logits, targets).compile().as_text()
    assert "all-gather" not in text


@pytest.mark.unsampled
@pytest.mark.parametrize("sizes", ((1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 1, 2)), ids=str)
@pytest.mark.parametrize("reduction", ("none", "mean"))
def test_mesh_axes_of_one_device(reduction, sizes):
    """Beside axes of several devices, which together with them split the tokens."""
    mesh = jax.make_mesh(sizes, ("dp", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[: np.prod(sizes)])
    batch = P(("dp", "fsdp"))
    out = batch if reduction == "none" else P()
    logits, targets, options = normal(4, 6, V), labels(4, 6), {"mesh": mesh, "out_specs": out, "reduction": reduction}
    rows = P(*batch, None, "tp")
    got = cross_entropy(logits, targets, in_specs=(rows, batch), **options)
    assert_same(got, cross_entropy(logits, targets, reduction=reduction))
    hidden, head = normal(4, 6, D), normal(D, V)
    specs = (None, batch, None, batch, P(None, "tp"))
    got = cross_entropy(targets=targets, hidden=hidden, lm_head_weight=head, in_specs=specs, **options)
    assert_same(got, cross_entropy(targets=targets, hidden=hidden, lm_head_weight=head, reduction=reduction))
    got = divergence(logits, logits * 2, in_specs=(batch, batch), **options)
    assert_same(got, divergence(logits, logits * 2, reduction=reduction))
    if sizes[1] == 1:
        specs = P("dp", None, ("fsdp", "tp")), P("dp")
        got = cross_entropy(logits, targets, in_specs=specs, **options | {"out_specs": P("dp") if reduction == "none" else P()})
        assert_same(got, cross_entropy(logits, targets, reduction=reduction))
    if sizes == (1, 1, 1):
        got = divergence(logits, logits * 2, in_specs=(rows, rows), **options)
        assert_same(got, divergence(logits, logits * 2, reduction=reduction))


def temporary_bytes(function, *shapes) -> int:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*arrays).compile().memory_analysis().temp_size_in_bytes


def test_logits_are_never_all_there():
    tokens, vocabulary, width = 2048, 8192, 32
    targets = jnp.zeros((tokens,), jnp.int32)

    def loss(hidden, head):
        return cross_entropy(targets=targets, hidden=hidden, lm_head_weight=head, label_smoothing=0.1).loss

    def kl(hidden, head):
        return divergence(student_hidden=hidden, student_head=head, teacher_hidden=hidden, teacher_head=head).loss

    everything = 4 * tokens * vocabulary
    for function, tiles in ((loss, 6), (kl, 12)):
        for phase in (function, jax.grad(function, (0, 1))):
            used = temporary_bytes(phase, (tokens, width), (width, vocabulary))
            assert used < min(everything / 2, tiles * 4 * 2**20 + 8 * 4 * width * (tokens + vocabulary))


def kl_expected(student, teacher, direction, temperature, beta=0.5):
    s, t = jax.nn.log_softmax(student / temperature), jax.nn.log_softmax(teacher / temperature)
    t = jax.lax.stop_gradient(t)
    m = jnp.log(beta * jnp.exp(t) + (1 - beta) * jnp.exp(s))
    terms = {
        "forward": jnp.exp(t) * (t - s),
        "reverse": jnp.exp(s) * (s - t),
        "jsd": beta * jnp.exp(t) * (t - m) + (1 - beta) * jnp.exp(s) * (s - m),
    }
    return temperature**2 * terms[direction].sum(-1).mean()


@pytest.mark.parametrize("direction", ("forward", "reverse", "jsd"))
@pytest.mark.parametrize("cfg", (None, TILES), ids=("one tile", "tiles"))
@pytest.mark.parametrize("sides", ("heads", "student", "teacher"))
def test_divergence_in_tiles(direction, cfg, sides):
    if cfg is None and sides != "heads":
        pytest.skip("one tile is tried with two heads")
    hidden, head, teacher, teacher_head = normal(3, 11, D), normal(D, V), normal(3, 11, 5), normal(5, V)
    beta = {"beta": 0.3} if direction == "jsd" else {}

    def ours(hidden, head):
        student = {"student_hidden": hidden, "student_head": head}
        other = {"teacher_hidden": teacher, "teacher_head": teacher_head}
        if sides == "teacher":
            student = {"student_logits": jnp.matmul(hidden, head, precision="highest")}
        if sides == "student":
            other = {"teacher_logits": jnp.matmul(teacher, teacher_head, precision="highest")}
        return divergence(**student, **other, direction=direction, temperature=2.0, cfg=cfg, **beta).loss

    def plain(hidden, head):
        products = (jnp.matmul(*pair, precision="highest") for pair in ((hidden, head), (teacher, teacher_head)))
        return kl_expected(*products, direction, 2.0, 0.3)

    assert_same(*(jax.jit(jax.value_and_grad(f, (0, 1)))(hidden, head) for f in (ours, plain)))


@pytest.mark.parametrize(("beta", "direction"), ((0.0, "forward"), (1.0, "reverse"), (0, "forward")))
def test_end_points_of_the_mixture_are_the_other_divergences(beta, direction):
    """As TRL and Liger define them; the limits after division by beta, or by 1 - beta."""
    student, teacher = normal(3, 5, V), normal(3, 5, V, seed=2)

    def ours(student):
        return divergence(student, teacher, direction="jsd", beta=beta, temperature=1.5).loss

    assert_same(*(jax.value_and_grad(f)(student) for f in (ours, lambda x: kl_expected(x, teacher, direction, 1.5))))
    near = abs(beta - 1e-3)
    limit = divergence(student, teacher, direction="jsd", beta=near, temperature=1.5).loss / 1e-3
    assert abs(limit - ours(student)) < 0.02 * limit


def test_the_teacher_is_a_constant():
    student, teacher = normal(4, V), normal(4, V, seed=2)
    assert not np.asarray(jax.grad(lambda teacher: divergence(student, teacher).loss)(teacher)).any()
    found = ejkernel.FusedKLDivergence()(student, student)
    assert abs(float(found.loss)) < 1e-6 and found.weight_sum == 4


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
def test_divergence_of_tokens_over_devices(kind):
    student, teacher, weights = normal(4, 6, V), normal(4, 6, V, seed=2), normal(4, 6, seed=3) ** 2

    def pulled(**sharded):
        return jax.jit(jax.value_and_grad(lambda student: divergence(student, teacher, weights, **sharded).loss))(student)

    specs = {"mesh": sharded_over(kind), "in_specs": (P("dp"),) * 3, "out_specs": P()}
    assert_same(pulled(**specs), pulled())


def test_divergence_where_no_token_counts():
    student = jnp.full((2, 5, V), jnp.nan)
    value, gradient = jax.value_and_grad(lambda x: divergence(x, x, attention_mask=jnp.zeros((2, 5))).loss)(student)
    assert value == 0
    assert not np.asarray(gradient).any()


X, L = np.ones((2, 5, V), np.float32), np.ones((2, 5), np.int32)
H, W = np.ones((2, 5, D), np.float32), np.ones((D, V), np.float32)
REFUSED = {
    "no labels": (lambda: cross_entropy(X), ValueError, "targets: got None, expected integer labels"),
    "nothing": (lambda: cross_entropy(targets=L), ValueError, "logits: got neither logits nor hidden"),
    "both": (lambda: cross_entropy(X, L, hidden=H, lm_head_weight=W), ValueError, "logits: got both logits and hidden"),
    "no head": (lambda: cross_entropy(targets=L, hidden=H), ValueError, "lm_head_weight: got None"),
    "a head of logits": (lambda: cross_entropy(X, L, lm_head_weight=W), ValueError, "lm_head_weight: got an array"),
    "another head": (
        lambda: cross_entropy(targets=L, hidden=X, lm_head_weight=W),
        ValueError,
        r"^lm_head_weight: got shape \(12, 40\)",
    ),
    "labels of floats": (lambda: cross_entropy(X, L * 1.0), ValueError, r"targets: got shape \(2, 5\), expected .*\[..., V\]"),
    "labels of another shape": (lambda: cross_entropy(X, L[:1]), ValueError, r"targets: got shape \(1, 5\)"),
    "weights of another shape": (
        lambda: cross_entropy(X, L, L[0]),
        ValueError,
        r"weights: got shape \(5,\), expected \(2, 5\)",
    ),
    "a reduction": (lambda: cross_entropy(X, L, reduction="avg"), ValueError, "reduction: got 'avg', expected one of none"),
    "a smoothing": (lambda: cross_entropy(X, L, label_smoothing=1.5), ValueError, r"label_smoothing: got 1.5"),
    "a z-loss": (lambda: cross_entropy(X, L, z_loss=-1), ValueError, "z_loss: got -1.0, expected a value >= 0"),
    "an axis": (lambda: cross_entropy(X, L, vocab_parallel_axis="tp"), ValueError, r"vocab_parallel_axis: got \('tp',\)"),
    "logits of integers": (lambda: cross_entropy(L[..., None], L * 0), TypeError, "^logits: got dtype int32"),
    "hidden of integers": (
        lambda: cross_entropy(targets=L, hidden=H.astype(int), lm_head_weight=W),
        TypeError,
        "^hidden: got dtype int",
    ),
    "logits of one number": (lambda: cross_entropy(X[0, 0, 0], L), ValueError, r"logits: got shape \(\), expected \[..., V\]"),
    "a head of one axis": (
        lambda: cross_entropy(targets=L, hidden=H, lm_head_weight=W[0]),
        ValueError,
        r"lm_head_weight: got shape \(40,\) with 1 axes, expected 2 axes",
    ),
    "a cap": (lambda: cross_entropy(X, L, logit_softcap=-1.0), ValueError, "^logit_softcap: got -1.0, expected a value > 0"),
    "a flag": (
        lambda: cross_entropy(targets=L, hidden=H, lm_head_weight=W, transpose_head=2),
        TypeError,
        "transpose_head: got 2, expected True or False",
    ),
    "complex weights": (lambda: cross_entropy(X, L, L * 1j), TypeError, "weights: got dtype complex"),
    "several smoothings": (lambda: cross_entropy(X, L, label_smoothing=np.ones(3)), TypeError, "label_smoothing: got array"),
    "an array of reductions": (lambda: cross_entropy(X, L, reduction=L), TypeError, "reduction: got ndarray"),
    "a direction": (lambda: divergence(X, X, direction="up"), ValueError, "direction: got 'up', expected one of forward"),
    "a temperature": (lambda: divergence(X, X, temperature=0.0), ValueError, "temperature: got 0.0, expected a value > 0"),
    "a beta": (lambda: divergence(X, X, beta=0.5), ValueError, "beta: got 0.5, expected None with direction 'forward'"),
    "a beta above 1": (
        lambda: divergence(X, X, direction="jsd", beta=1.5),
        ValueError,
        r"beta: got 1.5, expected a value in \[0, 1\]",
    ),
    "another vocabulary": (
        lambda: divergence(X, X[..., :9]),
        ValueError,
        "teacher_logits: got a vocabulary of 9, expected 40 as in student_logits",
    ),
    "half a student": (lambda: divergence(None, X, student_hidden=H), ValueError, "student_head: got None, expected a head"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()


def _linear(options, mesh=None):
    """Value and gradients of a loss of hidden states, and the operations that ran."""
    hidden, head, bias = (normal(*shape) for shape in ((2, 24, D), (D, V), (V,)))
    targets = np.arange(48, dtype=np.int32).reshape(2, 24) % V
    sharded = {} if mesh is None else {"mesh": mesh, "in_specs": (None, P("x"), None, P("x"), P(), P()), "out_specs": P()}

    def loss(hidden, head, bias):
        arrays = {"targets": targets, "hidden": hidden, "lm_head_weight": head, "lm_head_bias": bias}
        return cross_entropy(**arrays, z_loss=0.01, label_smoothing=0.1, **options, **sharded).loss

    program = jax.value_and_grad(loss, (0, 1, 2))
    text = jax.jit(program).lower(hidden, head, bias).as_text(debug_info=True)
    return program(hidden, head, bias), "ejkernel.linear_cross_entropy" in text


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_formed_in_the_forward(monkeypatch, reduction):
    """The sum of rows gives what the losses of rows give, on one device and over a mesh whose axes are split by hand."""
    wanted, early = _linear({"reduction": reduction})
    assert not early  # on several devices nothing says that XLA will not split the rows
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    got, early = _linear({"reduction": reduction})
    assert early
    assert_same(got, wanted)
    monkeypatch.undo()
    got, early = _linear({"reduction": reduction}, jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)))
    assert early
    assert_same(got, wanted)


def test_three_products_where_the_gradient_is_formed_in_the_forward(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    hidden, head = normal(16, D), normal(D, V)

    def products(function):
        return jax.jit(function).lower(hidden, head).compile().as_text().count(" dot(")

    def loss(hidden, head):
        return cross_entropy(targets=np.zeros(16, np.int32), hidden=hidden, lm_head_weight=head).loss

    assert products(loss) == 1 and products(jax.grad(loss, (0, 1))) == 3


def test_float16_keeps_the_loss_scale_in_front_of_its_gradients(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    hidden, head = normal(16, D).astype(np.float16), normal(D, V).astype(np.float16)
    text = jax.jit(lambda *x: cross_entropy(targets=np.zeros(16, np.int32), hidden=x[0], lm_head_weight=x[1]).loss)
    assert "ejkernel.cross_entropy" in text.lower(hidden, head).as_text(debug_info=True)
