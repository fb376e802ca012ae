"""vmap over inputs whose own axes an explicit mesh splits."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ejkernel

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
