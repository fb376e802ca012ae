"""Level 3, many devices: batch and head sharding without gathering, in every way that JAX shards."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ejkernel.call.arrays import has_gradient, named, parse_dims
from ejkernel.call.partition import AUTO_ON_TPU
from ejkernel.operations.common.tolerance import check_close
from ejkernel.testing.problem import Problem, with_empty_arrays
from ejkernel.testing.suite.transforms import SAME, skip_refused

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


class _Sharded:
    """A problem widened so that its batch and heads divide over a mesh, with a spec for every array.

    `mapped`: every array gets an axis before its own, which is split as the batch otherwise is and which `pull` is mapped over.
    """

    def __init__(self, problem: Problem, kind: AxisType, shape: tuple[int, int] | None = None, mapped: bool = False) -> None:
        data, model = shape or _mesh_shape()
        self.batches, self.members = (1, data) if mapped else (data, None)
        self.problem = problem
        self.mesh = jax.make_mesh((data, model), ("data", "model"), axis_types=(kind,) * 2)
        operation, call = problem.owner, problem.bound.call
        self.dims = {name: parse_dims(text) for name, text in operation.dimensions(call).items()}
        inputs = dict(named(problem.bound.inputs))
        self.axes = {} if mapped else {"b": "data"}
        heads = [a.shape[i] for n, a in inputs.items() for i, d in enumerate(self.dims[n]) if d.factor == "h"]
        if "h" in operation.shardable and heads and all(size == 1 or size % model == 0 for size in heads):
            self.axes["h"] = "model"
        self.inputs = operation.Inputs(
            **{**dict.fromkeys(operation.Inputs._fields), **{n: self._widened(n, a) for n, a in inputs.items()}}
        )
        self.request = problem.request().reshaped(self.inputs)
        outputs = operation.output_specs(self.request.call)
        rng = np.random.default_rng(0)
        visible = operation.public(call)
        self.cotangents = {
            n: jnp.asarray(rng.standard_normal(s.shape), s.dtype) for n, s in named(outputs) if n in visible and has_gradient(s)
        }

    def _widened(self, name: str, array: Any) -> Any:
        if array.shape[0] == 0 or (array.shape[0] == 1 and self.dims[name][0].broadcasts):
            return array
        copies = -(-self.batches // array.shape[0])
        scales = jnp.arange(1, copies + 1).astype(array.dtype) if jnp.issubdtype(array.dtype, jnp.floating) else None
        parts = [array if scales is None else array * scales[i] for i in range(copies)]
        return jnp.concatenate(parts)[: max(self.batches, array.shape[0] // self.batches * self.batches)]

    def spec(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        own, leading = shape[len(shape) - len(self.dims[name]) :], () if self.members is None else ("data",)
        axes = (self.axes.get(d.factor) if size != 1 else None for d, size in zip(self.dims[name], own, strict=True))
        return PartitionSpec(*leading, *axes)

    @property
    def differentiable(self) -> dict[str, Any]:
        return self.problem.owner.moving(self.inputs)

    def pull(self, inputs: dict[str, Any], cotangents: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Public outputs and gradients, from all canonical inputs."""
        return self._pull(inputs, cotangents) if self.members is None else jax.vmap(self._pull)(inputs, cotangents)

    def _pull(self, inputs: dict[str, Any], cotangents: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        operation = self.problem.owner
        full = operation.Inputs(**{**dict.fromkeys(operation.Inputs._fields), **inputs})
        request = self.request.reshaped(full)

        def outputs(values: dict[str, Any]) -> Any:
            got = dict(named(operation.run(request, full._replace(**values))))
            return {n: got[n] for n in cotangents}, got

        _, pullback, got = jax.vjp(outputs, {n: inputs[n] for n in self.differentiable}, has_aux=True)
        return got, pullback(cotangents)[0]

    def arguments(self, sharded: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        def place(values: dict[str, Any]) -> dict[str, Any]:
            if not sharded:
                return values
            return {n: jax.device_put(a, NamedSharding(self.mesh, self.spec(n, a.shape))) for n, a in values.items()}

        return place(self._stacked(dict(named(self.inputs)))), place(self._stacked(self.cotangents))

    def _stacked(self, values: dict[str, Any]) -> dict[str, Any]:
        """Different members along the axis that is mapped over."""
        if self.members is None:
            return values
        factors = [1 + 0.25 * member for member in range(self.members)]
        return {
            name: jnp.stack([array * factor if has_gradient(array) else array for factor in factors])
            for name, array in values.items()
        }

    def check(self, run: Any, arguments: tuple[Any, Any]) -> None:
        expected = jax.jit(self.pull)(*self.arguments(sharded=False))
        compiled = jax.jit(run).lower(*arguments).compile()
        gathers = re.findall(r"(?m)^.*= .* all-gather(?:-start)?\(.*$", compiled.as_text() or "")
        assert not gathers, f"{self.problem.operation} gathers:\n" + "\n".join(gathers[:3])
        for kind, got, want in zip(("output", "gradient"), compiled(*arguments), expected, strict=True):
            for name, value in got.items():
                check_close(f"{kind} {name}", jax.device_get(value), jax.device_get(want[name]), SAME[self.problem.dtype])


@pytest.mark.ejkernel_level("transforms")
def test_jit_over_sharded_inputs(transformed: Problem) -> None:
    """Auto mesh: inputs arrive sharded, nothing is said inside the program, and nothing is gathered."""
    skip_refused(transformed)
    chosen = transformed.explain().forward.chosen
    on_tpu = transformed.request().target.backend == "tpu"
    if on_tpu and chosen is not None and chosen.implementation.partitioning != "native":
        pytest.skip(f"{transformed.platform} refuses {transformed.case.name}: {AUTO_ON_TPU}")
    sharded = _Sharded(transformed, AxisType.Auto)
    sharded.check(sharded.pull, sharded.arguments(sharded=True))


@pytest.mark.ejkernel_level("transforms")
def test_explicit_mesh(transformed: Problem) -> None:
    """Explicit mesh: shardings are part of the types."""
    skip_refused(transformed)
    sharded = _Sharded(transformed, AxisType.Explicit)
    sharded.check(sharded.pull, sharded.arguments(sharded=True))


@pytest.mark.ejkernel_level("transforms")
def test_explicit_mesh_of_one_device(transformed: Problem) -> None:
    """Axes of one device split nothing, and are part of the types all the same."""
    skip_refused(transformed)
    sharded = _Sharded(transformed, AxisType.Explicit, (1, 1))
    sharded.check(sharded.pull, sharded.arguments(sharded=True))


@pytest.mark.ejkernel_level("transforms")
def test_arrays_not_on_the_mesh(transformed: Problem) -> None:
    """An Auto mesh is set, and arrays come from outside of it: whole, on one device."""
    skip_refused(transformed)
    sharded = _Sharded(transformed, AxisType.Auto)
    if transformed.request().target.backend == "tpu":
        pytest.skip(AUTO_ON_TPU)
    with jax.set_mesh(sharded.mesh):
        sharded.check(sharded.pull, sharded.arguments(sharded=False))


@pytest.mark.ejkernel_level("transforms")
def test_vmap_over_a_split_axis(transformed: Problem) -> None:
    """`jax.vmap` over an axis that an Explicit mesh splits: its mesh axis is taken for the operation inside."""
    skip_refused(transformed)
    sharded = _Sharded(transformed, AxisType.Explicit, mapped=True)
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
            sharded = _Sharded(problem, kind)
            sharded.check(sharded.pull, sharded.arguments(sharded=True))
            return
        refusals.append(f"{case.name}: {reason}")
    pytest.skip(f"{platform_name} refuses " + "; ".join(refusals or ["nothing: no case has an array without elements"]))


@pytest.mark.ejkernel_level("transforms")
def test_shard_map(transformed: Problem) -> None:
    """Inside `shard_map` with `check_vma=True`; gradients of replicated inputs are summed."""
    skip_refused(transformed)
    sharded = _Sharded(transformed, AxisType.Auto)
    inputs, cotangents = sharded.arguments(sharded=False)
    in_specs = tuple({n: sharded.spec(n, a.shape) for n, a in values.items()} for values in (inputs, cotangents))
    outputs = sharded.problem.owner.output_specs(sharded.request.call)
    visible = sharded.problem.owner.public(sharded.request.call)
    out_specs = (
        {n: sharded.spec(n, s.shape) for n, s in named(outputs) if n in visible},
        {n: in_specs[0][n] for n in sharded.differentiable},
    )
    mapped = jax.shard_map(sharded.pull, mesh=sharded.mesh, in_specs=in_specs, out_specs=out_specs)
    sharded.check(mapped, (inputs, cotangents))
