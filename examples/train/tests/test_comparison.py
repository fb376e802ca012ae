"""Builds held against each other: what a record says of one that computes something else, of one that fails, and of peers."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_train import comparison, data, plain, plain_experts, report
from ejkernel_train.config import MODELS, TrainConfig
from ejkernel_train.operations import Operations, choose

TINY = TrainConfig(dtype="float32", steps=3, batch=2, length=64)


def others(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    """The build "peers" is the plain one with these operations changed."""
    module = ModuleType("ejkernel_train.peers")
    module.__dict__.update({name: changed.get(name, getattr(plain, name)) for name in Operations._fields})
    monkeypatch.setitem(sys.modules, "ejkernel_train.peers", module)


def three(**options: Any) -> dict[str, Any]:
    configs = [dataclasses.replace(TINY, kernels=name, **options) for name in ("plain", "peers", "ejkernel")]
    return report.run(configs, data.load(), rounds=4, skip=1)


def test_three_builds(monkeypatch: pytest.MonkeyPatch):
    others(monkeypatch, swiglu=lambda gate, up: jax.nn.silu(gate) * up)
    record = three()
    assert [build["kernels"] for build in record["builds"]] == ["plain", "peers", "ejkernel"]
    for build in record["builds"]:
        assert build["agreement"]["with"] == "plain" and build["agreement"]["agrees"]
        assert build["agreement"]["gradient"] < 1e-4
        assert len(build["losses"]) == 3 and len(build["steps_seconds"]) == 3
        assert build["step_seconds"] == pytest.approx(np.median(build["steps_seconds"]), abs=1e-6)
    assert record["failed"] == []


def test_a_build_that_computes_something_else(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    others(monkeypatch, swiglu=lambda gate, up: jax.nn.gelu(gate) * up)
    found = {build["kernels"]: build["agreement"] for build in three()["builds"]}
    assert found["ejkernel"]["agrees"] and not found["peers"]["agrees"]
    assert found["peers"]["gradient"] > 0.02
    from ejkernel_train import __main__ as command

    assert (
        command.main(["--compare", "plain,peers", "--steps", "1", "--batch", "2", "--length", "32", "--dtype", "float32"]) == 1
    )
    assert "peers: NOT what plain computes" in capsys.readouterr().out


def test_a_build_that_fails_is_named(monkeypatch: pytest.MonkeyPatch):
    def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
        raise NotImplementedError("not on this device")

    others(monkeypatch, swiglu=swiglu)
    record = three()
    assert [build["kernels"] for build in record["builds"]] == ["plain", "ejkernel"]
    assert [(one["kernels"], one["error"]) for one in record["failed"]] == [
        ("peers", "NotImplementedError: not on this device")
    ]


def test_builds_of_different_models():
    with pytest.raises(ValueError, match="may differ in their kernels alone"):
        report.run([TINY, dataclasses.replace(TINY, kernels="plain", seed=1)], data.load())


def test_every_build_follows_every_other():
    """Over the rounds, so that none is always timed after the same."""

    class Named:
        def __init__(self, name: str) -> None:
            self.name, self.config = name, TINY

        def step(self, state: Any, window: Any) -> tuple[Any, report.Measured]:
            return (*state, self.name), report.Measured(0.0, 1.0, 1.0)

    seconds, order = comparison.timed([Named(name) for name in "abc"], (), data.load(), 6)  # pyright: ignore[reportArgumentType]
    assert [len(each) for each in seconds] == [6, 6, 6]
    rounds = ["".join(order[first : first + 3]) for first in range(0, 18, 3)]
    assert len({*rounds}) == 6


def test_peers_say_what_they_need(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "jla", None)
    for name in [name for name in sys.modules if name.startswith("jla.")] + ["ejkernel_train.peers"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(
        ValueError, match=r"the build 'peers' needs jax-linear-attention: pip install 'ejkernel-train\[peers\]'"
    ):
        choose("peers")


@pytest.mark.parametrize("model", MODELS)
def test_peers(model: str):
    pytest.importorskip("jla", reason="runs where jax-linear-attention is installed")
    for build in three(model=model)["builds"]:
        assert build["agreement"]["agrees"] and build["agreement"]["gradient"] < 1e-3


def test_rows_move_to_experts_and_back():
    """Against scatters with additions, which are what JAX makes of plain gathers."""
    keys = jax.random.split(jax.random.key(0), 4)
    x, weights = jax.random.normal(keys[0], (24, 8)), jax.random.uniform(keys[1], (24, 2))
    experts = jax.random.randint(keys[2], (24, 2), -1, 5)  # -1 and 4 are on other devices
    cotangent = jax.random.normal(keys[3], x.shape)

    def moved(x: jax.Array, weights: jax.Array) -> jax.Array:
        rows, _, places = plain_experts.moe_permute(x, experts, 4)
        return plain_experts.moe_unpermute(jnp.sin(rows), places, weights)

    def dense(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sin(x) * jnp.sum(weights, axis=1, keepdims=True)

    out, pull = jax.vjp(moved, x, weights)
    wanted, pull_wanted = jax.vjp(dense, x, weights)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    for found, right in zip(pull(cotangent), pull_wanted(cotangent), strict=True):
        np.testing.assert_allclose(found, right, atol=1e-5)
    rows, sizes, places = plain_experts.moe_permute(x, experts, 4)
    assert sizes.tolist() == [int(jnp.sum(experts == number)) for number in range(4)]
    np.testing.assert_array_equal(rows[places[:, 0]], x)
    at_home = np.sort(np.asarray(places)[(np.asarray(experts) >= 0) & (np.asarray(experts) < 4)])
    assert at_home.tolist() == list(range(int(sum(sizes))))


@pytest.mark.parametrize("operation", ["rms_norm", "swiglu", "causal_conv1d", "gated_rms_norm"])
def test_plain_keeps_no_float32_arrays(operation: str):
    """Of bfloat16 arguments the backward gets themselves and numbers of rows."""
    x = jnp.ones((2, 16, 32), jnp.bfloat16)
    vector, filters = jnp.ones(32), jnp.ones((32, 4), jnp.bfloat16)
    arguments = {
        "rms_norm": (x, vector),
        "swiglu": (x, x),
        "causal_conv1d": (x, filters),
        "gated_rms_norm": (x, x, vector),
    }[operation]
    _, pull = jax.vjp(getattr(plain, operation), *arguments)
    large = [leaf for leaf in jax.tree.leaves(pull) if getattr(leaf, "size", 0) >= x.size]
    assert large and all(leaf.dtype == jnp.bfloat16 for leaf in large)
