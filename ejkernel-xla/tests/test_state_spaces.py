"""Mamba, Mamba-2 and RWKV-4 on XLA: public functions by hand, forms that agree, memory, extremes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.operations import get_operation
from ejkernel.operations.rwkv4.cases import arrays as rwkv4_arrays
from ejkernel.operations.selective_scan.cases import arrays as scan_arrays
from ejkernel.utils.tolerance import Tolerance, check_close
from ejkernel_xla.rwkv4.config import Rwkv4Config
from ejkernel_xla.selective_scan.config import SelectiveScanConfig

CLOSE = Tolerance(1e-5, 1e-4)


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def mamba(length: int = 9, **sizes: Any) -> tuple[tuple[Any, ...], Any]:
    """Positional arguments of `state_space_v1` up to dt, and an initial state."""
    made = scan_arrays(length=length, state=True, **sizes)(np.random.default_rng(0))
    return tuple(made[name] for name in ("x", "A", "B", "C", "D", "dt")), made["initial_state"]


def scanned(x: Any, A: Any, B: Any, C: Any, D: Any, dt: Any, state: Any) -> tuple[Any, Any]:
    outs, state = [], state.astype(np.float64)
    for t in range(x.shape[1]):
        state = np.exp(dt[:, t, :, None] * A) * state + (dt[:, t] * x[:, t])[:, :, None] * B[:, t, None, :]
        outs.append((state * C[:, t, None, :]).sum(-1) + D * x[:, t])
    return np.stack(outs, axis=1), state


def test_state_space_v1_by_hand() -> None:
    arrays, state = mamba()
    out, last = scanned(*arrays, state)
    gate = np.random.default_rng(1).standard_normal(out.shape).astype(np.float32)
    conv = jnp.arange(3.0)
    for gated, wanted in (
        ({}, out),
        ({"gate": gate}, out * silu(gate)),
        ({"gate": gate, "act_fn": jnp.tanh}, out * np.tanh(gate)),
    ):
        got, got_last, passed = ejkernel.state_space_v1(*arrays, initial_state=state, conv_state=conv, **gated)
        check_close("y", got, wanted, CLOSE)
        check_close("state", got_last, last, CLOSE)
        assert passed is conv
    assert ejkernel.state_space_v1(*arrays)[2] is None


def ssd_arrays(length: int = 9, groups: int = 2) -> tuple[tuple[Any, ...], Any]:
    rng = np.random.default_rng(0)
    batch, heads, channels, width = 2, 4, 3, 5
    x = rng.standard_normal((batch, length, heads, channels)).astype(np.float32)
    A, D = -np.exp(rng.standard_normal(heads)).astype(np.float32), rng.standard_normal(heads).astype(np.float32)
    B, C = rng.standard_normal((2, batch, length, groups, width)).astype(np.float32)
    dt = rng.random((batch, length, heads)).astype(np.float32)
    return (x, A, B, C, D, dt), rng.standard_normal((batch, heads, channels, width)).astype(np.float32)


def ssd(x: Any, A: Any, B: Any, C: Any, D: Any, dt: Any, state: Any) -> tuple[Any, Any]:
    B, C = (np.repeat(array, x.shape[2] // array.shape[2], axis=2) for array in (B, C))
    outs, state = [], state.astype(np.float64)
    for t in range(x.shape[1]):
        written = np.einsum("bhp,bhn->bhpn", dt[:, t, :, None] * x[:, t], B[:, t])
        state = np.exp(dt[:, t] * A)[:, :, None, None] * state + written
        outs.append(np.einsum("bhpn,bhn->bhp", state, C[:, t]) + D[:, None] * x[:, t])
    out = np.stack(outs, axis=1)
    return out.reshape(*out.shape[:2], -1), state


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_state_space_v2_by_hand(groups: int) -> None:
    arrays, state = ssd_arrays(groups=groups)
    out, last = ssd(*arrays, state)
    gate = np.random.default_rng(1).standard_normal(out.shape).astype(np.float32)
    normal = out / np.sqrt((out**2).mean(-1, keepdims=True) + 0.1)
    for gated, wanted in (
        ({}, out),
        ({"gate": gate, "act_fn": jnp.tanh}, out * np.tanh(gate)),
        ({"gate": gate, "use_gated_rmsnorm": True, "rmsnorm_eps": 0.1}, normal * silu(gate)),
    ):
        got, got_last, passed = ejkernel.state_space_v2(
            *arrays, initial_state=state, conv_state=None, n_groups=groups, precision=jax.lax.Precision.HIGHEST, **gated
        )
        assert got.shape == (2, 9, 12)
        check_close("y", got, wanted, CLOSE)
        check_close("state", got_last, last, CLOSE)
        assert passed is None


def test_state_space_v2_token_by_token() -> None:
    arrays, state = ssd_arrays()
    whole, last = ejkernel.state_space_v2(*arrays, initial_state=state)[:2]
    x, A, B, C, D, dt = arrays
    outs = []
    for t in range(x.shape[1]):
        now = slice(t, t + 1)
        out, state, _ = ejkernel.state_space_v2(x[:, now], A, B[:, now], C[:, now], D, dt[:, now], initial_state=state)
        outs.append(out)
    check_close("y", jnp.concatenate(outs, axis=1), whole, CLOSE)
    check_close("state", state, last, CLOSE)


def test_state_space_v2_gradients_by_differences() -> None:
    arrays, state = ssd_arrays(length=4)
    arrays = tuple(map(jnp.asarray, arrays))
    weights = np.random.default_rng(2).standard_normal((2, 4, 12))

    def loss(arrays: Any, state: Any) -> Any:
        out, last, _ = ejkernel.state_space_v2(*arrays, initial_state=state)
        return jnp.sum(out * weights) + jnp.sum(jnp.sin(last))

    def by_hand(arrays: Any, state: Any) -> float:
        out, last = ssd(*arrays, state)
        return float((out * weights).sum() + np.sin(last).sum())

    gradients = jax.grad(loss, (0, 1))(arrays, jnp.asarray(state))
    values = [*(np.asarray(array, np.float64) for array in arrays), np.asarray(state, np.float64)]
    rng = np.random.default_rng(3)
    for index, gradient in enumerate([*gradients[0], gradients[1]]):
        direction = rng.standard_normal(values[index].shape)
        moved = [[*values[:index], values[index] + step * direction, *values[index + 1 :]] for step in (1e-6, -1e-6)]
        slope = (by_hand(moved[0][:6], moved[0][6]) - by_hand(moved[1][:6], moved[1][6])) / 2e-6
        along = float(np.vdot(np.asarray(gradient, np.float64), direction))
        assert abs(slope - along) < 1e-4 * (1 + abs(slope)), index


def test_rwkv4_by_hand() -> None:
    made = rwkv4_arrays()(np.random.default_rng(0))
    w, u, k, v = (np.asarray(made[name], np.float64) for name in "wukv")
    wanted = np.zeros(v.shape)
    for t in range(k.shape[1]):
        weights = [np.exp(k[:, s] - (t - 1 - s) * np.exp(w)) for s in range(t)] + [np.exp(u + k[:, t])]
        wanted[:, t] = sum(weight * v[:, s] for s, weight in enumerate(weights)) / sum(weights)
    check_close("out", ejkernel.rwkv4(made["w"], made["u"], made["k"], made["v"]), wanted, CLOSE)


def test_rwkv4_token_by_token() -> None:
    made = rwkv4_arrays(length=5)(np.random.default_rng(0))
    whole, last = ejkernel.RWKV4()(*(made[name] for name in "wukv"), return_state=True)
    state, outs = None, []
    for t in range(5):
        out, state = ejkernel.rwkv4(
            made["w"], made["u"], made["k"][:, t : t + 1], made["v"][:, t : t + 1], state=state, return_state=True
        )
        outs.append(out)
    check_close("out", jnp.concatenate(outs, axis=1), whole, CLOSE)
    check_close("state", state, last, CLOSE)


def test_rwkv4_keys_of_any_size() -> None:
    """The mean does not change when every key grows by the same amount, however large; gradients stay finite."""
    made = rwkv4_arrays(length=6)(np.random.default_rng(0))
    w, u, k, v = (jnp.asarray(made[name]) for name in "wukv")
    out = ejkernel.rwkv4(w, u, k, v)
    for shift in (1024.0, -1024.0):
        check_close("out", ejkernel.rwkv4(w, u, k + shift, v), out, Tolerance(1e-3, 1e-3))
        gradients = jax.grad(lambda *arrays: jnp.sum(ejkernel.rwkv4(*arrays)), (0, 1, 2, 3))(w, u, k + shift, v)
        assert all(bool(jnp.all(jnp.isfinite(gradient))) for gradient in gradients)


@pytest.mark.parametrize("config", [SelectiveScanConfig(16), SelectiveScanConfig(16, associative=True)])
def test_selective_scan_memory(config: SelectiveScanConfig) -> None:
    """No `[B,T,I,N]` array, forward or backward: per token far less than one state."""
    channels, width = 64, 64
    operation = get_operation("selective_scan")

    def temporary(length: int, backward: bool) -> int:
        made = scan_arrays(1, length, channels, width)(np.random.default_rng(0))
        arrays = {name: jnp.asarray(value) for name, value in made.items()}

        def value(arrays: dict[str, Any]) -> Any:
            return jnp.sum(operation.invoke(arrays, {}, platform="xla", cfg=config)[0])

        function = jax.grad(value) if backward else value
        analysis = jax.jit(function).lower(arrays).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    state = 4 * channels * width
    tokens = 4 * (2 * channels + 2 * width)
    assert (temporary(1024, False) - temporary(512, False)) / 512 < 3 * tokens
    assert (temporary(1024, True) - temporary(512, True)) / 512 < 4 * tokens + 2 * state / 16 < state / 2


def test_forms_of_the_scan_agree() -> None:
    arrays, state = mamba(length=21)
    names = ("x", "A", "B", "C", "D", "dt")
    given = {**dict(zip(names, arrays, strict=True)), "initial_state": state}
    operation = get_operation("selective_scan")
    wanted = scanned(*arrays, state)
    for config in (SelectiveScanConfig(8), SelectiveScanConfig(8, associative=True), SelectiveScanConfig(32, unroll=5)):
        got = operation.invoke(given, {}, platform="xla", cfg=config)
        for name, one, other in zip(("out", "state"), got, wanted, strict=True):
            check_close(f"{name} with {config}", one, other, CLOSE)


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (SelectiveScanConfig, {"chunk_size": 0}, "chunk_size, unroll: got 0, 1, expected values >= 1"),
        (SelectiveScanConfig, {"unroll": 0}, "chunk_size, unroll: got 64, 0, expected values >= 1"),
        (Rwkv4Config, {"chunk_size": -1}, "chunk_size, unroll: got -1, 1, expected values >= 1"),
    ],
)
def test_config_is_checked(config: Any, fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**fields)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"n_groups": 3}, ValueError, "B: got 2 groups, expected n_groups = 3"),
        ({"act_fn": "silu"}, TypeError, "act_fn: got 'silu', expected a function of an array, or None"),
        ({"n_groups": "2"}, TypeError, "n_groups: got '2', expected an int or None"),
        ({"use_gated_rmsnorm": None}, TypeError, "use_gated_rmsnorm: got None, expected True or False"),
        ({"use_gated_rmsnorm": True}, ValueError, "use_gated_rmsnorm: got True, expected a gate with it; pass gate="),
        (
            {"gate": np.ones((2, 9, 4), np.float32)},
            ValueError,
            r"gate: got shape \(2, 9, 4\), expected \(2, 9, 12\) = \[B, T, H",
        ),
        ({"D": np.ones(3, np.float32)}, ValueError, r"D: got shape \(3,\), expected \(4,\) = \[H\]"),
        ({"initial_state": np.ones((2, 4, 5, 3), np.float32)}, ValueError, r"initial_state: got .* = \[B, H, P, N\]"),
        ({"precision": "best"}, ValueError, "precision: got 'best', expected None or one of default, high, highest"),
    ],
)
def test_state_space_v2_refuses(changed: Any, error: type[Exception], message: str) -> None:
    names = ("x", "A", "B", "C", "D", "dt")
    arguments = {**dict(zip(names, ssd_arrays()[0], strict=True)), **changed}
    with pytest.raises(error, match=message):
        ejkernel.state_space_v2(**arguments)
