"""`mamba3` on XLA beside NumPy, one token after the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_numpy import assert_close, check_by_tokens

import ejkernel
from ejkernel.utils.tolerance import deviation

TOKENS = ("x", "B", "C", "dt", "trap", "angles")
STATE = ("theta", "matrix", "last_key", "last_x")
BATCH, HEADS, GROUPS, WIDTH, CHANNELS, PAIRS = 2, 4, 2, 6, 3, 2


def problem(length: int = 21, batch: int = BATCH, sequences: int | None = None) -> dict[str, Any]:
    """All arguments: A of every token, two of three pairs that turn, angles of two heads together."""
    rng = np.random.default_rng(0)
    normal, states = rng.standard_normal, sequences or batch
    arrays = {
        "x": normal((batch, length, HEADS, CHANNELS)),
        "A": -np.exp(normal((batch, length, HEADS))),
        "B": normal((batch, length, GROUPS, WIDTH)),
        "C": normal((batch, length, GROUPS, WIDTH)),
        "D": normal((HEADS, CHANNELS)),
        "dt": normal((batch, length, HEADS)),
        "trap": 2 * normal((batch, length, HEADS)),
        "angles": normal((batch, length, 2, PAIRS)),
        "B_bias": normal((HEADS, WIDTH)),
        "C_bias": normal((HEADS, WIDTH)),
        "dt_bias": normal(HEADS),
        "theta": 3 * normal((states, HEADS, PAIRS)),
        "matrix": normal((states, HEADS, WIDTH, CHANNELS)),
        "last_key": normal((states, HEADS, WIDTH)),
        "last_x": normal((states, HEADS, CHANNELS)),
    }
    return {name: value.astype(np.float32) for name, value in arrays.items()}


def turned(array: Any, theta: Any) -> Any:
    """Neighbouring channels as the parts of a complex number; those after the last angle stay."""
    complex_pairs = array[..., 0::2] + 1j * array[..., 1::2]
    complex_pairs[..., : theta.shape[-1]] *= np.exp(1j * theta)
    return np.stack([complex_pairs.real, complex_pairs.imag], axis=-1).reshape(array.shape)


def by_tokens(
    x: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    dt: Any,
    trap: Any,
    angles: Any,
    B_bias: Any,
    C_bias: Any,
    dt_bias: Any,
    theta: Any,
    matrix: Any,
    last_key: Any,
    last_x: Any,
) -> tuple[Any, ...]:
    """y, and the four parts of the last state."""
    inputs, outputs, angles = (np.repeat(array, HEADS // array.shape[2], axis=2) for array in (B, C, angles))
    steps, outs = np.log1p(np.exp(dt + dt_bias)), [np.zeros((x.shape[0], 0, *x.shape[2:]))]
    decays = np.exp(np.broadcast_to(A, dt.shape) * steps)
    for t in range(x.shape[1]):
        theta = np.mod(theta + np.pi * np.tanh(angles[:, t]) * steps[:, t, :, None], 2 * np.pi)
        key, query = turned(inputs[:, t] + B_bias, theta), turned(outputs[:, t] + C_bias, theta)
        decay, share = decays[:, t], 1 / (1 + np.exp(-trap[:, t]))
        outer = lambda weight, key, x: np.einsum("bh,bhn,bhp->bhnp", weight, key, x)
        matrix = decay[..., None, None] * matrix + outer(decay * (1 - share) * steps[:, t], last_key, last_x)
        matrix = matrix + outer(share * steps[:, t], key, x[:, t])
        outs.append((np.einsum("bhnp,bhn->bhp", matrix, query) + np.broadcast_to(D, (HEADS, CHANNELS)) * x[:, t])[:, None])
        last_key, last_x = key, x[:, t]
    return np.concatenate(outs, axis=1), theta, matrix, last_key, last_x


def run(*, theta: Any = None, matrix: Any = None, last_key: Any = None, last_x: Any = None, **arrays: Any) -> tuple[Any, ...]:
    """`mamba3` with its state unpacked, as `by_tokens` has it."""
    state = None if theta is None else (theta, matrix, last_key, last_x)
    out, last = ejkernel.mamba3(**arrays, initial_state=state, dt_softplus=True, cfg={"chunk_size": 16})
    return out, *last


def cut(arrays: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The call of some tokens."""
    return {name: value[:, start:stop] if name in (*TOKENS, "A") else value for name, value in arrays.items()}


def stateless(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arrays.items() if name not in STATE}


@pytest.mark.parametrize("length", [1, 21])
def test_by_tokens(length: int) -> None:
    """Values and every gradient; 21 tokens are no multiple of the chunk."""
    check_by_tokens(run, by_tokens, problem(length))


def test_arrays_of_other_ranks_and_no_state() -> None:
    """A and D per head, all pairs turn by angles of every head, a group for each head, and zeros before the first token."""
    arrays, rng = problem(), np.random.default_rng(1)
    arrays["A"], arrays["D"] = arrays["A"][0, 0], arrays["D"][:, 0]
    arrays["angles"] = rng.standard_normal((BATCH, 21, HEADS, 3)).astype(np.float32)
    for name in "BC":
        arrays[name] = rng.standard_normal((BATCH, 21, HEADS, WIDTH)).astype(np.float32)
    arrays["theta"] = np.zeros((BATCH, HEADS, 3), np.float32)
    zeros = {**arrays, **{name: np.zeros_like(arrays[name]) for name in STATE}}
    wanted = by_tokens(**{**zeros, "D": zeros["D"][:, None]})
    for one, other in zip(run(**stateless(arrays)), wanted, strict=True):
        assert_close(one, other, 1e-5)


def test_whole_shares_without_angles_are_mamba_2() -> None:
    arrays = problem()
    trap, angles = np.full_like(arrays["trap"], np.inf), np.zeros((BATCH, 21, 1, 0), np.float32)
    A, dt = arrays["A"][0, 0], np.abs(arrays["dt"])
    given = (arrays["x"], A, arrays["B"], arrays["C"], arrays["D"], dt)
    out, (theta, matrix, _, _) = ejkernel.mamba3(*given, trap, angles)
    wanted, state, _ = ejkernel.state_space_v2(*given)
    assert_close(out, np.reshape(wanted, out.shape), 1e-6)
    assert_close(matrix, jnp.swapaxes(state, 2, 3), 1e-6)
    assert theta.shape == (BATCH, HEADS, 0)


def test_no_token_returns_the_state_and_its_gradient() -> None:
    arrays = cut(problem(), 0, 0)
    state = tuple(jnp.asarray(arrays[name]) for name in STATE)
    found, pull = jax.vjp(lambda state: ejkernel.mamba3(**stateless(arrays), initial_state=state)[1], state)
    for one, other, gradient in zip(found, state, pull(state)[0], strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(gradient, other)


def test_calls_of_one_token_equal_the_whole() -> None:
    arrays = problem(5)
    whole, outs = run(**arrays), []
    state: dict[str, Any] = {name: arrays[name] for name in STATE}
    for t in range(5):
        out, *last = run(**{**cut(arrays, t, t + 1), **state})
        state = dict(zip(STATE, last, strict=True))
        outs.append(out)
    assert_close(jnp.concatenate(outs, axis=1), whole[0], 2e-6)
    for one, other in zip(state.values(), whole[1:], strict=True):
        assert_close(one, other, 2e-6)


@pytest.mark.parametrize("given", [True, False], ids=["state", "zeros"])
def test_packed_sequences(given: bool) -> None:
    """Each has its own state, one without tokens returns it; tokens after the last hold NaN and have no gradient."""
    arrays, bounds = problem(12, batch=1, sequences=4), [0, 4, 4, 5, 10]
    arrays = arrays if given else stateless(arrays)
    for name in (*TOKENS, "A"):
        arrays[name][:, 10:] = np.nan

    def loss(floats: Any, bounds: Any = None) -> Any:
        found = run(**floats, cu_seqlens=bounds)
        return sum(jnp.sum(leaf * jnp.sin(leaf)) for leaf in found), found

    (_, found), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays, jnp.asarray(bounds))
    shared: dict[str, Any] = dict.fromkeys(("D", "B_bias", "C_bias", "dt_bias"), 0.0)
    for i in range(4):
        rows = slice(bounds[i], bounds[i + 1])
        one = cut(arrays, *bounds[i : i + 2]) | {name: arrays[name][i : i + 1] for name in STATE if given}
        (_, wanted), slopes = jax.value_and_grad(loss, has_aux=True)({name: jnp.asarray(each) for name, each in one.items()})
        assert_close(found[0][:, rows], wanted[0], 1e-5)
        for whole, part in zip(found[1:], wanted[1:], strict=True):
            assert_close(whole[i : i + 1], part, 1e-5)
        for name, slope in slopes.items():
            if name in shared:
                shared[name] = shared[name] + slope
                continue
            part = gradients[name][i : i + 1] if name in STATE else gradients[name][:, rows]
            assert_close(part, slope, 2e-5, name)
    for name, slope in shared.items():
        assert_close(gradients[name], slope, 2e-5, name)
    assert not found[0][:, 10:].any()
    assert all(not gradients[name][:, 10:].any() for name in (*TOKENS, "A"))


def test_a_sequence_does_not_touch_its_neighbours() -> None:
    arrays, bounds = stateless(problem(9, batch=1)), np.array([0, 3, 6, 9])
    spoilt = {name: value.copy() for name, value in arrays.items()}
    for name in (*TOKENS, "A"):
        spoilt[name][:, 3:6] = np.nan
    clean, found = (run(**given, cu_seqlens=bounds) for given in (arrays, spoilt))
    np.testing.assert_array_equal(np.delete(found[0], slice(3, 6), axis=1), np.delete(clean[0], slice(3, 6), axis=1))
    for one, other in zip(found[1:], clean[1:], strict=True):
        np.testing.assert_array_equal(one[::2], other[::2])


def test_angles_do_not_drift() -> None:
    """Whole turns are dropped while they are summed: one float32 sum is off by a tenth of a turn after 100,000 tokens."""
    length = 100_000
    dt = np.random.default_rng(0).random((1, length, 1)).astype(np.float32)
    angles, ones = np.full((1, length, 1, 1), 40, np.float32), np.ones((1, length, 1, 2), np.float32)  # tanh is 1
    (theta, *_) = ejkernel.mamba3(ones, -ones[0, 0, 0, :1], ones, ones, None, dt, dt, angles)[1]
    turns = dt.astype(np.float64).sum() / 2
    assert turns > 20_000
    assert abs((float(theta[0, 0, 0]) / (2 * np.pi) - turns + 0.5) % 1 - 0.5) < 2e-5


def test_rates_that_forget() -> None:
    """-inf: a token keeps nothing of what came before, but for tokens with dt = 0."""
    arrays = {name: jnp.asarray(value) for name, value in stateless(problem(6)).items() if name != "dt_bias"}
    arrays["dt"] = jnp.abs(arrays["dt"])
    arrays["A"] = jnp.full_like(arrays["A"], -jnp.inf)
    call = lambda arrays: ejkernel.mamba3(**arrays)[0]
    out, gradients = jax.value_and_grad(lambda arrays: jnp.sum(jnp.sin(call(arrays))))(arrays)
    assert_close(out, sum(jnp.sum(jnp.sin(call(cut(arrays, t, t + 1)))) for t in range(6)), 1e-5)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())
    paused = {**arrays, "dt": arrays["dt"].at[:, 3].set(0)}
    assert not np.array_equal(call(paused)[:, 3], call(cut(paused, 3, 4))[:, 0])
    assert_close(call(paused)[:, 3:], call(cut(paused, 2, 6))[:, 1:], 1e-5)


def test_bfloat16() -> None:
    arrays = {name: jnp.asarray(value, jnp.bfloat16) for name, value in problem().items()}
    found = run(**arrays)
    assert found[0].dtype == jnp.bfloat16 and all(leaf.dtype == jnp.float32 for leaf in found[1:])
    wanted = by_tokens(**{name: np.asarray(value, np.float64) for name, value in arrays.items()})
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, 2e-2)


def test_gradients_of_angles_in_bfloat16() -> None:
    """Sums over all later tokens, of which only pairs of tokens around an angle do not cancel."""
    arrays = {name: jnp.asarray(value, jnp.bfloat16) for name, value in stateless(problem(600, batch=1)).items()}

    def gradients(dtype: Any) -> Any:
        def loss(given: Any) -> Any:
            out = ejkernel.mamba3(**given, dt_softplus=True)[0]
            return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape)).astype(jnp.bfloat16).astype(out.dtype))

        return jax.grad(loss)({name: array.astype(dtype) for name, array in arrays.items()})

    wanted = gradients(jnp.float32)
    for name, gradient in gradients(jnp.bfloat16).items():
        assert deviation(gradient, wanted[name]).norm < 1e-2, name


def test_float16_does_not_hold_values_times_shares() -> None:
    """A token brings along its predecessor, whose product with its share is in no array: gradients before it would be NaN."""
    arrays = {name: jnp.asarray(value, jnp.float16) for name, value in stateless(problem()).items()}
    arrays |= {
        "B": arrays["B"] / 64,
        "C": arrays["C"] / 64,
        "B_bias": None,
        "C_bias": None,
        "D": None,
        "dt": 400 + arrays["dt"],
    }
    arrays |= {"x": arrays["x"] * 400, "A": arrays["A"] / 1000}

    def value_and_gradients(dtype: Any) -> Any:
        given = {name: None if array is None else array.astype(dtype) for name, array in arrays.items()}
        out, pull = jax.vjp(lambda given: ejkernel.mamba3(**given)[0], given)
        return out, pull(jnp.full_like(out, 1e-3))[0]

    (out, gradients), (exact, wanted) = value_and_gradients(jnp.float16), value_and_gradients(jnp.float32)
    assert_close(out, exact, 5e-3)
    assert_close(gradients["A"], wanted["A"], 2e-2)
    assert all(np.isfinite(gradients[name]).all() for name in ("x", "C", "dt", "trap", "angles"))


def test_explain_and_class_form() -> None:
    arrays = stateless(problem())
    shapes = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in arrays.items()}
    explanation = ejkernel.explain("mamba3", **shapes)
    assert explanation.forward.chosen is not None and explanation.forward.chosen.platform == "xla"
    np.testing.assert_array_equal(ejkernel.Mamba3()(**arrays)[0], ejkernel.mamba3(**arrays)[0])


def ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": ones(2, 21, 12)}, ValueError, r"x: got shape \(2, 21, 12\) with 3 axes"),
        ({"A": ones(2, 4)}, ValueError, r"A: got shape \(2, 4\), expected \(4,\) = \[H\]"),
        ({"A": ones(2, 20, 4)}, ValueError, r"A: got shape \(2, 20, 4\), expected \(2, 21, 4\)"),
        ({"B": ones(2, 21, 2, 5), "C": ones(2, 21, 2, 5)}, ValueError, "B: got N = 5, expected an even N"),
        ({"B": ones(2, 21, 3, 6), "C": ones(2, 21, 3, 6)}, ValueError, "B: got 3 groups"),
        ({"C": ones(2, 21, 2, 4)}, ValueError, r"C: got shape \(2, 21, 2, 4\)"),
        ({"D": ones(4, 4)}, ValueError, r"D: got shape \(4, 4\), expected \(4, 3\)"),
        ({"dt": ones(2, 21, 1)}, ValueError, r"dt: got shape \(2, 21, 1\), expected \(2, 21, 4\)"),
        ({"trap": ones(2, 21, 1)}, ValueError, r"trap: got shape \(2, 21, 1\), expected \(2, 21, 4\)"),
        ({"trap": np.ones((2, 21, 4), int)}, TypeError, "trap: got dtype int"),
        ({"trap": None}, TypeError, "trap: got None"),
        (
            {"angles": ones(2, 21, 3, 2)},
            ValueError,
            r"angles: got shape \(2, 21, 3, 2\), expected \[2, 21, M, R\], M a divisor",
        ),
        ({"angles": ones(2, 21, 1, 4)}, ValueError, r"angles: got shape \(2, 21, 1, 4\), .* R at most N / 2 = 3"),
        ({"B_bias": ones(4, 1, 6)}, ValueError, r"B_bias: got shape \(4, 1, 6\), expected \(4, 6\) = \[H, N\]"),
        ({"C_bias": ones(2, 6)}, ValueError, r"C_bias: got shape \(2, 6\)"),
        ({"dt_bias": ones(1)}, ValueError, r"dt_bias: got shape \(1,\)"),
        ({"initial_state": ones(2, 4, 6, 3)}, TypeError, "initial_state: got ndarray, expected a tuple of four arrays"),
        (
            {"initial_state": (ones(2, 4, 3),) * 4},
            ValueError,
            r"initial_state: got shape \(2, 4, 3\), expected \(2, 4, 2\) = theta",
        ),
        ({"dt_softplus": 1}, TypeError, "dt_softplus: got 1"),
        ({"cu_seqlens": np.array([0, 21])}, ValueError, "x: got batch 2, expected batch 1 with cu_seqlens"),
        ({"cu_seqlens": np.array([0, 22])}, ValueError, "cu_seqlens: got .* to at most 21 = length of x"),
    ],
)
def test_refusals(change: Any, error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {**stateless(problem()), **change}
    with pytest.raises(error, match="^" + message):
        ejkernel.mamba3(**given)
