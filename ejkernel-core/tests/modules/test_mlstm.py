"""`mlstm` on XLA beside NumPy, which keeps nothing relative to a maximum, one token after the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_numpy import assert_close, check_by_tokens

import ejkernel

GATES = ("input_gate", "forget_gate")


def problem(length: int = 21, batch: int = 2, sequences: int | None = None) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    heads, width, channels = 2, 4, 3
    states = sequences or batch
    arrays = {
        "query": rng.standard_normal((batch, length, heads, width)),
        "key": rng.standard_normal((batch, length, heads, width)),
        "value": rng.standard_normal((batch, length, heads, channels)),
        "input_gate": 2 * rng.standard_normal((batch, length, heads)),
        "forget_gate": 2 + 2 * rng.standard_normal((batch, length, heads)),
        "matrix": rng.standard_normal((states, heads, width, channels)),
        "vector": rng.standard_normal((states, heads, width)),
        "offset": rng.standard_normal((states, heads)),
    }
    return {name: value.astype(np.float32) for name, value in arrays.items()}


def by_tokens(
    query: Any, key: Any, value: Any, input_gate: Any, forget_gate: Any, matrix: Any, vector: Any, offset: Any
) -> tuple[Any, Any, Any]:
    """h, and the last C and n as they are."""
    C, n = matrix * np.exp(offset)[..., None, None], vector * np.exp(offset)[..., None]
    m, outs = offset, [np.zeros((*value.shape[:1], 0, *value.shape[2:]))]
    for t in range(query.shape[1]):
        forget = 1 / (1 + np.exp(-forget_gate[:, t]))
        m = np.maximum(np.log(forget) + m, input_gate[:, t])
        k = np.exp(input_gate[:, t])[..., None] * key[:, t]
        C, n = forget[..., None, None] * C + k[..., None] * value[:, t, :, None], forget[..., None] * n + k
        q = query[:, t] / np.sqrt(query.shape[-1])
        divisor = np.maximum(np.abs((n * q).sum(-1)), 1) + 1e-6 * np.exp(m)
        outs.append((np.einsum("bhdv,bhd->bhv", C, q) / divisor[..., None])[:, None])
    return np.concatenate(outs, axis=1), C, n


def run(*, matrix: Any = None, vector: Any = None, offset: Any = None, **arrays: Any) -> tuple[Any, Any, Any]:
    """`mlstm`, with the last C and n as they are."""
    state = None if matrix is None else (matrix, vector, offset)
    out, (C, n, m) = ejkernel.mlstm(**arrays, initial_state=state, cfg={"chunk_size": 16})
    return out, C * jnp.exp(m)[..., None, None], n * jnp.exp(m)[..., None]


def tokens(arrays: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {name: arrays[name][:, start:stop] for name in ("query", "key", "value", *GATES)}


def state_of(arrays: dict[str, Any]) -> tuple[Any, Any, Any]:
    return arrays["matrix"], arrays["vector"], arrays["offset"]


@pytest.mark.parametrize("length", [1, 21])
def test_by_tokens(length: int) -> None:
    """Values and every gradient, also through m, which cancels; 21 tokens are no multiple of the chunk."""
    check_by_tokens(run, by_tokens, problem(length))


def test_the_last_state() -> None:
    """It is kept relative to the running maximum; without an initial state that begins with zeros."""
    arrays = problem()
    gates = {name: arrays[name].astype(np.float64) for name in GATES}
    for state, start in ((state_of(arrays), arrays["offset"]), (None, np.zeros((2, 2)))):
        m = start
        for t in range(21):
            m = np.maximum(m - np.log1p(np.exp(-gates["forget_gate"][:, t])), gates["input_gate"][:, t])
        out, (C, n, last) = ejkernel.mlstm(**tokens(arrays, 0, 21), initial_state=state)
        assert_close(last, m, 1e-6)
        given = {name: arrays[name] if state else np.zeros_like(arrays[name]) for name in ("matrix", "vector", "offset")}
        wanted = by_tokens(**tokens(arrays, 0, 21), **given)
        assert_close(out, wanted[0], 1e-5)
        assert_close(C, wanted[1] * np.exp(-m)[..., None, None], 1e-5)
        assert_close(n, wanted[2] * np.exp(-m)[..., None], 1e-5)


def test_no_token_returns_the_state_and_its_gradient() -> None:
    arrays = problem(0)
    state = tuple(map(jnp.asarray, state_of(arrays)))
    found, pull = jax.vjp(lambda state: ejkernel.mlstm(**tokens(arrays, 0, 0), initial_state=state)[1], state)
    for one, other, gradient in zip(found, state, pull(state)[0], strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(gradient, other)


def test_calls_of_one_token_equal_the_whole() -> None:
    arrays = problem(5)
    whole, last = ejkernel.mlstm(**tokens(arrays, 0, 5), initial_state=state_of(arrays))
    state, outs = state_of(arrays), []
    for t in range(5):
        out, state = ejkernel.mlstm(**tokens(arrays, t, t + 1), initial_state=state)
        outs.append(out)
    assert_close(jnp.concatenate(outs, axis=1), whole, 2e-6)
    for one, other in zip(state, last, strict=True):
        assert_close(one, other, 2e-6)


def test_packed_sequences() -> None:
    """Each has its own state, an empty one returns it; tokens after the last hold NaN and have no gradient."""
    arrays = problem(12, batch=1, sequences=3)
    bounds = [0, 4, 4, 10]
    for name in ("query", "key", "value", *GATES):
        arrays[name][:, 10:] = np.nan

    def loss(floats: Any) -> Any:
        found = run(**floats, cu_seqlens=jnp.asarray(bounds))
        return sum(jnp.sum(leaf * 0.1) for leaf in found), found

    (_, found), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    for i in range(3):
        rows = slice(bounds[i], bounds[i + 1])
        one = {**tokens(arrays, *bounds[i : i + 2]), **{k: arrays[k][i : i + 1] for k in ("matrix", "vector", "offset")}}

        def alone(floats: Any) -> Any:
            found = run(**floats)
            return sum(jnp.sum(leaf * 0.1) for leaf in found), found

        (_, wanted), slopes = jax.value_and_grad(alone, has_aux=True)({k: jnp.asarray(v) for k, v in one.items()})
        assert_close(found[0][:, rows], wanted[0], 1e-5)
        for whole, part in zip(found[1:], wanted[1:], strict=True):
            assert_close(whole[i : i + 1], part, 1e-5)
        for name, slope in slopes.items():
            part = gradients[name][:, rows] if name in tokens(arrays, 0, 1) else gradients[name][i : i + 1]
            assert_close(part, slope, 2e-5, name)
    assert not found[0][:, 10:].any()
    assert all(not gradients[name][:, 10:].any() for name in tokens(arrays, 0, 1))


def test_gates_of_any_size() -> None:
    """Exponentials that float32 cannot hold change nothing: shifted together, h is what it was where n is above 1."""
    arrays = tokens(problem(), 0, 21)
    arrays["input_gate"] = np.round(64 * arrays["input_gate"]) / 64  # float32 holds their sum with 1000
    far = {**arrays, "input_gate": arrays["input_gate"] + 1000}
    near = {**arrays, "input_gate": arrays["input_gate"] + 60}
    assert_close(ejkernel.mlstm(**far)[0], ejkernel.mlstm(**near)[0], 2e-5)
    low = {**arrays, "input_gate": arrays["input_gate"] - 1000, "forget_gate": arrays["forget_gate"] - 1000}
    for given in (far, low):
        gradients = jax.grad(lambda floats: jnp.sum(jnp.sin(ejkernel.mlstm(**floats)[0])))(given)
        assert all(np.isfinite(gradient).all() for gradient in gradients.values())
    assert np.abs(ejkernel.mlstm(**low)[0]).max() < 1e-30


@pytest.mark.parametrize("activation", ["sigmoid", "exp"])
def test_infinite_gates(activation: Any) -> None:
    """-inf takes no token in, and forgets: a sequence starts anew; nothing at all gives 0."""
    arrays = {name: jnp.asarray(value) for name, value in tokens(problem(), 0, 21).items()}
    arrays["forget_gate"] = -jnp.abs(arrays["forget_gate"])
    cut = {**arrays, "forget_gate": arrays["forget_gate"].at[:, 9].set(-jnp.inf)}
    run = lambda arrays: ejkernel.mlstm(**arrays, forget_activation=activation)[0]
    alone = run({name: value[:, 9:] for name, value in arrays.items()})
    assert_close(run(cut)[:, 9:], alone, 1e-5)
    empty = {**arrays, "input_gate": arrays["input_gate"].at[:, :4].set(-jnp.inf)}
    assert not run(empty)[:, :4].any()
    assert_close(run(empty)[:, 4:], run({name: value[:, 4:] for name, value in arrays.items()}), 1e-5)
    for given in (cut, empty):
        gradients = jax.grad(lambda floats: jnp.sum(jnp.sin(run(floats))))(given)
        assert all(np.isfinite(gradient).all() for gradient in gradients.values())


def test_forget_activation_exp_is_the_logarithm() -> None:
    arrays = tokens(problem(), 0, 21)
    logs = {**arrays, "forget_gate": np.asarray(jax.nn.log_sigmoid(arrays["forget_gate"]))}
    assert_close(ejkernel.mlstm(**logs, forget_activation="exp")[0], ejkernel.mlstm(**arrays)[0], 1e-6)


def test_bfloat16() -> None:
    arrays = {name: jnp.asarray(value, jnp.bfloat16) for name, value in problem().items()}
    found = run(**arrays)
    assert found[0].dtype == jnp.bfloat16 and found[1].dtype == jnp.float32
    wanted = by_tokens(**{name: np.asarray(value, np.float64) for name, value in arrays.items()})
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, 2e-2)


def test_explain_and_class_form() -> None:
    arrays = tokens(problem(), 0, 21)
    explanation = ejkernel.explain("mlstm", **arrays)
    assert explanation.forward.chosen is not None and explanation.forward.chosen.platform == "xla"
    np.testing.assert_array_equal(ejkernel.MLSTM()(**arrays)[0], ejkernel.mlstm(**arrays)[0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"key": np.ones((2, 21, 1, 4), np.float32)}, ValueError, r"key: got shape \(2, 21, 1, 4\), expected .* as query"),
        ({"value": np.ones((2, 20, 2, 3), np.float32)}, ValueError, r"value: got shape \(2, 20, 2, 3\)"),
        ({"input_gate": np.ones((2, 21, 1), np.float32)}, ValueError, r"input_gate: got shape \(2, 21, 1\)"),
        ({"forget_gate": np.ones((2, 21, 2), int)}, TypeError, "forget_gate: got dtype int"),
        ({"forget_gate": None}, TypeError, "forget_gate: got None"),
        (
            {"initial_state": np.ones((2, 2, 4, 3), np.float32)},
            TypeError,
            "initial_state: got ndarray, expected a tuple of three",
        ),
        ({"initial_state": (np.ones((2, 2, 4, 4), np.float32),) * 3}, ValueError, r"initial_state: got shape \(2, 2, 4, 4\)"),
        ({"forget_activation": "tanh"}, ValueError, "forget_activation: got 'tanh', expected 'sigmoid' or 'exp'"),
        ({"epsilon": -1.0}, ValueError, r"epsilon: got -1\.0"),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale: got '1'"),
        ({"cu_seqlens": np.array([0, 21])}, ValueError, "query: got batch 2, expected batch 1 with cu_seqlens"),
    ],
)
def test_refusals(change: Any, error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {**tokens(problem(), 0, 21), **change}
    with pytest.raises(error, match="^" + message):
        ejkernel.mlstm(**given)
