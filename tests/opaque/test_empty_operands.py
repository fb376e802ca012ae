"""A phase whose operands are all without elements, while a result has some: nothing is there to split."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ejkernel


@pytest.mark.unsampled
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sizes_of_no_tokens(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    whole = NamedSharding(mesh, PartitionSpec())
    x, experts = jax.device_put((jnp.zeros((0, 8)), jnp.zeros((0, 2), jnp.int32)), whole)
    with jax.set_mesh(mesh):
        found = jax.jit(lambda x, experts: ejkernel.moe_permute(x, experts, 3, platform="opaque"))(x, experts)
    np.testing.assert_array_equal(jax.device_get(found.group_sizes), [0, 0, 0])
    assert found.rows.shape == (0, 8) and found.positions.shape == (0, 2)
