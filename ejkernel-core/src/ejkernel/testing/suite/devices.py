"""Level 3, many devices: batch and head sharding without gathering, in every way that JAX shards."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AxisType

from ejkernel.call.partition import AUTO_ON_TPU
from ejkernel.testing.problem import Problem, with_empty_arrays
from ejkernel.testing.sharded import Sharded, sizes_of
from ejkernel.testing.suite.transforms import skip_refused

__all__ = [
    "test_arrays_not_on_the_mesh",
    "test_arrays_without_elements",
    "test_explicit_mesh",
    "test_explicit_mesh_of_one_device",
    "test_jit_over_sharded_inputs",
    "test_shard_map",
    "test_vmap_over_a_split_axis",
]


def _mesh_shape() -> tuple[int, int]:
    """Batch and head shards: as many of 8 as there are devices for."""
    devices = len(jax.devices())
    if devices < 2:
        pytest.skip("needs 2 devices or more, this machine has 1")
    return (4, 2) if devices >= 8 else (2, 2) if devices >= 4 else (2, 1)


def _batch_and_heads(problem: Problem, kind: AxisType, shape: tuple[int, int] | None = None, mapped: bool = False) -> Sharded:
    """Batch and heads over a mesh.

    `mapped`: every array gets an axis before its own, which is split as the batch otherwise is and which `pull` is mapped over.
    """
    data, model = shape or _mesh_shape()
    mesh = jax.make_mesh((data, model), ("data", "model"), axis_types=(kind,) * 2)
    axes = {} if mapped else {"b": "data"}
    heads = sizes_of(problem, "h")
    if "h" in problem.owner.shardable and heads and all(size == 1 or size % model == 0 for size in heads):
        axes["h"] = "model"
    return Sharded(problem, mesh, axes, members=data if mapped else None)


@pytest.mark.ejkernel_level("transforms")
def test_jit_over_sharded_inputs(transformed: Problem) -> None:
    """Auto mesh: inputs arrive sharded, nothing is said inside the program, and nothing is gathered."""
    skip_refused(transformed)
    chosen = transformed.explain().forward.chosen
    on_tpu = transformed.request().target.backend == "tpu"
    if on_tpu and chosen is not None and chosen.implementation.partitioning != "native":
        pytest.skip(f"{transformed.platform} refuses {transformed.case.name}: {AUTO_ON_TPU}")
    sharded = _batch_and_heads(transformed, AxisType.Auto)
    sharded.check(sharded.pull, sharded.arguments(sharded=True))


@pytest.mark.ejkernel_level("transforms")
def test_explicit_mesh(transformed: Problem) -> None:
    """Explicit mesh: shardings are part of the types."""
    skip_refused(transformed)
    sharded = _batch_and_heads(transformed, AxisType.Explicit)
    sharded.check(sharded.pull, sharded.arguments(sharded=True))


@pytest.mark.ejkernel_level("transforms")
def test_explicit_mesh_of_one_device(transformed: Problem) -> None:
    """Axes of one device split nothing, and are part of the types all the same."""
    skip_refused(transformed)
    sharded = _batch_and_heads(transformed, AxisType.Explicit, (1, 1))
    sharded.check(sharded.pull, sharded.arguments(sharded=True))


@pytest.mark.ejkernel_level("transforms")
def test_arrays_not_on_the_mesh(transformed: Problem) -> None:
    """An Auto mesh is set, and arrays come from outside of it: whole, on one device."""
    skip_refused(transformed)
    sharded = _batch_and_heads(transformed, AxisType.Auto)
    if transformed.request().target.backend == "tpu":
        pytest.skip(AUTO_ON_TPU)
    with jax.set_mesh(sharded.mesh):
        sharded.check(sharded.pull, sharded.arguments(sharded=False))


@pytest.mark.ejkernel_level("transforms")
def test_vmap_over_a_split_axis(transformed: Problem) -> None:
    """`jax.vmap` over an axis that an Explicit mesh splits: its mesh axis is taken for the operation inside."""
    skip_refused(transformed)
    sharded = _batch_and_heads(transformed, AxisType.Explicit, mapped=True)
    with jax.set_mesh(sharded.mesh):
        sharded.check(sharded.pull, sharded.arguments(sharded=True))


@pytest.mark.ejkernel_level("transforms")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_arrays_without_elements(operation_name: str, kind: AxisType, platform_name: str) -> None:
    """Arrays without elements among others, over a mesh: XLA's compiler dies where a manual computation reads one."""
    refusals: list[str] = []
    for case in with_empty_arrays(operation_name):
        problem = Problem(operation_name, case, "float32", platform_name).in_what_runs()
        reason = problem.refusal() or problem.refusal("backward")
        if kind is AxisType.Auto and problem.request().target.backend == "tpu":
            reason = AUTO_ON_TPU
        if reason is None:
            sharded = _batch_and_heads(problem, kind)
            sharded.check(sharded.pull, sharded.arguments(sharded=True))
            return
        refusals.append(f"{case.name}: {reason}")
    pytest.skip(f"{platform_name} refuses " + "; ".join(refusals or ["nothing: no case has an array without elements"]))


@pytest.mark.ejkernel_level("transforms")
def test_shard_map(transformed: Problem) -> None:
    """Inside `shard_map` with `check_vma=True`; gradients of replicated inputs are summed."""
    skip_refused(transformed)
    sharded = _batch_and_heads(transformed, AxisType.Auto)
    sharded.check(sharded.mapped(check_vma=True), sharded.arguments(sharded=False))
