"""One key head beside several query heads that are split: it is on every device, and must be counted once."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ejkernel

SHAPES = {"query": (2, 3, 4, 8), "key": (2, 3, 1, 8), "cos": (3, 4), "sin": (3, 4), "q_scale": (8,), "k_scale": (8,)}
SPLIT = {"query": ("data", None, "model"), "key": ("data",)}
ARRAYS = {name: jax.random.normal(jax.random.key(seed), shape) for seed, (name, shape) in enumerate(SHAPES.items())}


def both_phases(function: Any, *arrays: Any) -> Any:
    outputs, pull = jax.vjp(lambda *arrays: function(*arrays, platform="opaque"), *arrays)
    return outputs, pull(jax.tree.map(lambda out: out[..., ::-1] + 1, outputs))


@pytest.mark.unsampled
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(("function", "count"), [(ejkernel.llama_rope, 4), (ejkernel.fused_qk_norm_rope, 6)])
def test_counted_once(function: Any, count: int, kind: Any) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    whole = [*ARRAYS.items()][:count]
    split = [jax.device_put(array, NamedSharding(mesh, PartitionSpec(*SPLIT.get(name, ())))) for name, array in whole]
    run = jax.jit(both_phases, static_argnums=0)
    got, wanted = run(function, *split), run(function, *(array for _, array in whole))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(jax.device_get(one), jax.device_get(other), rtol=1e-5, atol=1e-5)
