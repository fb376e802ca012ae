"""Muon for optax, beside optax's own."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.operations.newton_schulz.interface import OPERATION

optax = pytest.importorskip("optax", reason="install optax to run Muon")
optimizers = importlib.import_module("ejkernel.optimizers")  # needs optax

SHAPES = {"up": (12, 20), "down": (20, 12), "gate": (12, 20), "norm": (12,), "bias": (20,)}
SETTINGS = [
    {},
    {"nesterov": False, "beta": 0.8},
    {"consistent_rms": 0.2, "weight_decay": 0.1, "adam_weight_decay": 0.3, "adam_learning_rate": 0.02},
    {"ns_steps": 3, "eps": 1e-3, "mu_dtype": jnp.bfloat16},
    {"ns_coeffs": ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377)), "ns_steps": 2},
]


def tree(seed: int, lead: tuple[int, ...] = ()) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal((*lead, *shape)), jnp.float32) for name, shape in SHAPES.items()}


def steps(transformation: Any, lead: tuple[int, ...] = (), count: int = 4) -> Iterator[Any]:
    params = tree(0, lead)
    state = transformation.init(params)
    update = jax.jit(transformation.update)
    for step in range(1, count + 1):
        updates, state = update(tree(step, lead), state, params)
        params = optax.apply_updates(params, updates)
        yield params


def assert_close(found: Any, expected: Any, atol: float = 2e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), found, expected)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_numbers_are_those_of_optax(settings):
    rate = optax.linear_schedule(0.1, 0.01, 5)
    ours = optimizers.muon(rate, dtype="float32", **settings)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # as optax's AdamW needs it, too
        for found, expected in zip(steps(ours), steps(optax.contrib.muon(rate, **settings)), strict=True):
            assert_close(found, expected, 2e-4 if "mu_dtype" in settings else 2e-5)  # optax rounds the product with beta, too


@pytest.fixture
def promoting():
    with jax.numpy_dtype_promotion("standard"):  # as AdamW of optax needs it
        yield


def test_matrices_of_layers_in_one_array(promoting):
    """A batch of matrices moves as each of them would."""
    stacked = optimizers.muon(0.1, dtype="float32", matrices=lambda params: {name: name != "norm" for name in params})
    params, gradients = ({name: tree(seed, (3,))[name] for name in ("up", "down", "norm")} for seed in (0, 1))
    updates, _ = stacked.update(gradients, stacked.init(params), params)
    for layer in range(3):
        single = optimizers.muon(0.1, dtype="float32")
        own, mine = (jax.tree.map(lambda leaf, layer=layer: leaf[layer], one) for one in (params, gradients))
        expected, _ = single.update(mine, single.init(own), own)
        assert_close(jax.tree.map(lambda leaf, layer=layer: leaf[layer], updates), expected)


def test_one_call_for_each_shape(monkeypatch):
    calls = []
    invoke = type(OPERATION).invoke
    monkeypatch.setattr(
        type(OPERATION),
        "invoke",
        lambda self, arrays, *rest, **run: calls.append(arrays["x"].shape) or invoke(self, arrays, *rest, **run),
    )
    given = {name: leaf for name, leaf in tree(0).items() if leaf.ndim == 2}
    found = optimizers.orthogonalize({**given, "more": jnp.ones((2, 3, 12, 20))}, dtype="float32")
    assert calls == [(1, 20, 12), (8, 12, 20)]
    for name, leaf in given.items():
        singular = np.linalg.svd(np.asarray(found[name]), compute_uv=False)
        assert found[name].shape == leaf.shape and singular.min() > 0.6 and singular.max() < 1.25


def test_a_vector_is_refused():
    with pytest.raises(ValueError, match=r"updates: got a leaf of shape \(20,\), expected \[..., M, N\]; leave it to another"):
        optimizers.orthogonalize(tree(0))


def test_in_bfloat16_the_update_is_nearly_orthogonal():
    transformation = optimizers.scale_by_muon()
    gradient = {"up": tree(0)["up"]}
    update, state = transformation.update(gradient, transformation.init(gradient))
    singular = np.linalg.svd(np.asarray(update["up"]), compute_uv=False)
    assert singular.min() > 0.6 and singular.max() < 1.25 and state.count == 1
