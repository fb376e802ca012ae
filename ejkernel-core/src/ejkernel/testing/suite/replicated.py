"""Level 3, many devices: arrays that are whole on every device beside arrays that are split.

Weights, scales, biases and initial states are so in every data-parallel program, and their gradients are sums over devices: one
sum too few or too many is a wrong number and nothing else.
"""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AxisType

from ejkernel.call.partition import AUTO_ON_TPU
from ejkernel.testing.problem import Problem
from ejkernel.testing.sharded import Sharded, sizes_of
from ejkernel.testing.suite.transforms import skip_refused

__all__ = ["test_whole_beside_split", "test_whole_beside_split_in_shard_map"]


def _split_in_turn(problem: Problem, kind: AxisType, devices: int, *, beside: bool) -> list[Sharded]:
    """The problem split along each factor that may be split."""
    if len(jax.devices()) < devices:
        pytest.skip(f"needs {devices} devices, this machine has {len(jax.devices())}")
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(kind,), devices=jax.devices()[:devices])
    factors = [factor for factor in problem.owner.shardable if max(sizes_of(problem, factor), default=0)]
    return [Sharded(problem, mesh, {factor: "data"}, beside=beside) for factor in factors]


@pytest.mark.ejkernel_level("transforms")
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_whole_beside_split(transformed: Problem, kind: AxisType, devices: int) -> None:
    """One array is split, all others are whole: outputs and gradients are those of one device, placed as the inputs are."""
    skip_refused(transformed)
    if kind is AxisType.Auto and transformed.request().target.backend == "tpu":
        pytest.skip(AUTO_ON_TPU)
    chosen = transformed.explain().forward.chosen
    if jax.default_backend() == "cpu" and (chosen is None or chosen.implementation.partitioning != "native"):
        pytest.skip(
            "an interpreter's callbacks among collectives can end the process on a CPU; run it on the platform's device"
        )
    for sharded in _split_in_turn(transformed, kind, devices, beside=True):
        arguments = sharded.arguments(sharded=True)
        # what is split follows the one array, and is gathered where its gradient or its cotangent is whole
        _, gradients = sharded.check(sharded.pull, arguments, may_gather=True)
        if kind is AxisType.Explicit:
            others = {n for n, g in gradients.items() if not g.sharding.is_equivalent_to(arguments[0][n].sharding, g.ndim)}
            assert not others, f"gradients that are not placed as their inputs are: {sorted(others)}"


@pytest.mark.ejkernel_level("transforms")
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_whole_beside_split_in_shard_map(transformed: Problem, check_vma: bool, devices: int) -> None:
    """Arrays without the factor that is split are whole, inside `jax.shard_map` with and without its checks."""
    skip_refused(transformed)
    for sharded in _split_in_turn(transformed, AxisType.Auto, devices, beside=False):
        sharded.check(sharded.mapped(check_vma=check_vma), sharded.arguments(sharded=False))
