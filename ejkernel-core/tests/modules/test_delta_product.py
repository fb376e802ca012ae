"""`gated_delta_product` on XLA beside NumPy, one Householder step after the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_numpy import assert_close, check_by_tokens

import ejkernel

STEPS = 3


def problem(length: int = 21, batch: int = 2, sequences: int | None = None) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    heads, width, channels = 2, 4, 3
    key = rng.standard_normal((batch, length * STEPS, heads, width))
    arrays = {
        "query": rng.standard_normal((batch, length, heads, width)),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": rng.standard_normal((batch, length * STEPS, heads, channels)),
        "beta": 2 * rng.random((batch, length * STEPS, heads)),
        "decay": -rng.random((batch, length, heads)),
        "initial_state": rng.standard_normal((sequences or batch, heads, width, channels)),
    }
    return {name: value.astype(np.float32) for name, value in arrays.items()}


def by_tokens(query: Any, key: Any, value: Any, beta: Any, decay: Any, initial_state: Any) -> tuple[Any, Any]:
    state, outs = initial_state.copy(), [np.zeros((query.shape[0], 0, *value.shape[2:]))]
    for t in range(query.shape[1]):
        state = np.exp(decay[:, t])[..., None, None] * state
        for step in range(t * STEPS, (t + 1) * STEPS):
            error = beta[:, step, :, None] * (value[:, step] - np.einsum("bhdv,bhd->bhv", state, key[:, step]))
            state = state + key[:, step, :, :, None] * error[:, :, None]
        outs.append(query.shape[-1] ** -0.5 * np.einsum("bhdv,bhd->bhv", state, query[:, t])[:, None])
    return np.concatenate(outs, axis=1), state


def run(**arrays: Any) -> Any:
    options: dict[str, Any] = {"use_qk_l2norm": False, "return_state": True, "chunk_size": 16, "num_householder": STEPS}
    return ejkernel.gated_delta_product(**arrays, **options)


def tokens(arrays: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The arrays of some tokens, without the state."""
    steps = {name: arrays[name][:, start * STEPS : stop * STEPS] for name in ("key", "value", "beta")}
    return {**{name: arrays[name][:, start:stop] for name in ("query", "decay")}, **steps}


@pytest.mark.parametrize("length", [0, 1, 21])
def test_by_tokens(length: int) -> None:
    """Values and every gradient; 63 steps are no multiple of the chunk."""
    if length:
        check_by_tokens(run, by_tokens, problem(length))
    else:
        assert run(**problem(0))[0].shape == (2, 0, 2, 3)
        assert_close(run(**problem(0))[1], problem(0)["initial_state"], 0.0)


def test_calls_of_one_token_equal_the_whole() -> None:
    arrays = problem(5)
    whole, last = run(**arrays)
    state, outs = arrays["initial_state"], []
    for t in range(5):
        out, state = run(**tokens(arrays, t, t + 1), initial_state=state)
        outs.append(out)
    assert_close(jnp.concatenate(outs, axis=1), whole, 1e-6)
    assert_close(state, last, 1e-6)


def test_packed_sequences_and_segments() -> None:
    """Both cut between tokens, never between the steps of one; a padding token holds NaN and has no gradient."""
    arrays = problem(9, batch=1, sequences=2)
    bounds = [0, 4, 8]
    arrays["value"][:, 8 * STEPS :], arrays["query"][:, 8:] = np.nan, np.nan

    def loss(floats: Any) -> Any:
        out, state = run(**floats, cu_seqlens=jnp.asarray(bounds))
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(state)), (out, state)

    (_, (out, states)), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    for i in range(2):
        alone, state = run(**tokens(arrays, *bounds[i : i + 2]), initial_state=arrays["initial_state"][i : i + 1])
        assert_close(out[:, bounds[i] : bounds[i + 1]], alone, 1e-6)
        assert_close(states[i], state[0], 1e-6)
    assert not out[:, 8:].any()
    for name, count in (("value", STEPS), ("query", 1), ("decay", 1)):
        assert np.isfinite(gradients[name]).all() and not gradients[name][:, 8 * count :].any()

    del arrays["initial_state"]
    ids = jnp.array([[0] * 4 + [3] * 4 + [-1]])
    out, state = run(**arrays, seg_ids=ids)
    alone, last = run(**tokens(arrays, 4, 8))
    assert_close(out[:, 4:8], alone, 1e-6)
    assert_close(state, last, 1e-6)
    assert not out[:, 8:].any()


def test_one_step_is_the_gated_delta_rule() -> None:
    arrays = {**tokens(problem(21), 0, 7)}
    arrays = {name: value[:, :7] for name, value in arrays.items()}
    got = ejkernel.gated_delta_product(**arrays, num_householder=1, return_state=True)
    for one, other in zip(got, ejkernel.gated_delta_rule(**arrays, return_state=True), strict=True):
        np.testing.assert_array_equal(one, other)


def test_bfloat16() -> None:
    arrays = {name: jnp.asarray(value, jnp.bfloat16) for name, value in problem().items()}
    out, state = run(**arrays)
    assert out.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    wanted = by_tokens(**{name: np.asarray(value, np.float64) for name, value in arrays.items()})
    assert_close(out, wanted[0], 1e-2)
    assert_close(state, wanted[1], 1e-2)


def test_over_a_mesh() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec, state = jax.sharding.PartitionSpec("data", None, "model"), jax.sharding.PartitionSpec("data", "model")
    got = run(**problem(), mesh=mesh, in_specs=(spec,) * 5 + (state,), out_specs=(spec, state))
    for one, other in zip(got, run(**problem()), strict=True):
        assert_close(one, other, 1e-6)


def test_explain() -> None:
    arrays = problem()
    explanation = ejkernel.explain("gated_delta_product", **arrays, num_householder=STEPS)
    assert explanation.forward.chosen is not None and explanation.forward.chosen.platform == "xla"
    assert "delta_rule" in str(explanation)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_householder": 0}, ValueError, "num_householder: got 0, expected a value >= 1"),
        ({"num_householder": 2.0}, TypeError, r"num_householder: got 2\.0, expected an int"),
        ({"num_householder": True}, TypeError, "num_householder: got True, expected an int"),
        ({"num_householder": 2}, ValueError, r"key: got shape \(2, 63, 2, 4\), expected batch 2 and 42 = T \* num_householder"),
        ({"decay": np.ones((2, 63, 2), np.float32)}, ValueError, r"decay: got shape \(2, 63, 2\), expected .*\[B,T,H\]"),
        ({"decay": np.ones((2, 21, 2, 4), np.float32)}, ValueError, "decay: got shape .* with 4 axes, expected 3 axes"),
        ({"seg_ids": np.zeros((2, 63), np.int32)}, ValueError, r"seg_ids: got shape \(2, 63\), expected \(2, 21\)"),
        ({"cu_seqlens": np.array([0, 21])}, ValueError, "query: got batch 2, expected batch 1 with cu_seqlens"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale: got nan"),
        ({"beta": None}, TypeError, "beta: got None"),
    ],
)
def test_refusals(change: Any, error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {**problem(), "num_householder": STEPS, **change}
    with pytest.raises(error, match="^" + message):
        ejkernel.gated_delta_product(**given)
