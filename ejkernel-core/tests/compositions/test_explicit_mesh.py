"""Explicit meshes: vmap over inputs whose own axes they split, and inputs that are not on them."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ejkernel
from ejkernel._dispatch import execution

X = jax.random.normal(jax.random.key(0), (3, 8, 16, 64))
SCALE = jax.random.normal(jax.random.key(1), (3, 64))


def gradients(x, scale):
    return jax.vmap(jax.grad(lambda x, s: (ejkernel.rms_norm(x, s) ** 2).sum(), argnums=(0, 1)))(x, scale)


@pytest.mark.parametrize(
    "spec", [PartitionSpec(None, "data"), PartitionSpec(None, "data", "model"), PartitionSpec(None, None, "data")], ids=str
)
def test_batch_that_is_split_stays_split(spec):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.device_put(X, NamedSharding(mesh, spec))
    scale = jax.device_put(SCALE, NamedSharding(mesh, PartitionSpec()))
    found = jax.jit(gradients)(x, scale)
    for got, expected in zip(found, gradients(X, SCALE), strict=True):
        np.testing.assert_allclose(jax.device_get(got), jax.device_get(expected), rtol=1e-5, atol=1e-4)
    assert jax.typeof(found[0]).sharding.spec == PartitionSpec(*spec, *[None] * (4 - len(spec)))


def normed(x, scale):
    return ejkernel.rms_norm(x, scale)


def attended(x, sinks):
    return ejkernel.flash_attention(x, x, x, causal=True, softmax_aux=sinks)


def multiplied(x, rhs):
    return ejkernel.grouped_matmul(x, rhs, np.array([5, 3], np.int32))


@pytest.mark.parametrize(
    ("run", "x", "other"),
    [
        (normed, (8, 16, 64), (64,)),
        (attended, (8, 16, 4, 64), (4,)),
        (multiplied, (8, 64), (2, 64, 32)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_gradients_of_an_input_that_is_not_on_the_mesh(run, x, other):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    x, other = jax.random.normal(jax.random.key(0), x), jax.random.normal(jax.random.key(1), other)
    both = jax.jit(jax.value_and_grad(lambda *arrays: (run(*arrays) ** 2).sum(), (0, 1)))
    wanted, gradients_wanted = both(x, other)
    value, found = both(jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))), other)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for got, expected in zip(found, gradients_wanted, strict=True):
        np.testing.assert_allclose(jax.device_get(got), jax.device_get(expected), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", AxisType, ids=str)
def test_a_phase_is_decided_once(kind, monkeypatch):
    if kind == AxisType.Manual:
        pytest.skip("arrays cannot be placed on it")
    phases = []
    decide = execution.decide
    monkeypatch.setattr(execution, "decide", lambda request, phase: phases.append(phase) or decide(request, phase))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    x = jax.device_put(X.reshape(8, 3, 16, 64), NamedSharding(mesh, PartitionSpec("data")))
    jax.jit(lambda x: attended(x, None))(x)
    assert phases == ["forward"]
    out, pull = jax.vjp(lambda x: attended(x, None), x)
    pull(out)
    assert phases[1:] == ["forward", "backward"]
