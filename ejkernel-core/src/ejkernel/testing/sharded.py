"""A problem over the devices of a mesh, beside the same problem on one device."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.call.arrays import has_gradient, named, parse_dims
from ejkernel.call.partition import explicit_mesh_of
from ejkernel.operations.common.tolerance import GRADIENT, Tolerance, check_close
from ejkernel.testing.problem import Problem

SAME = {**GRADIENT, "float32": Tolerance(2e-6, 2e-5)}
"""Of what a transform gives and what it should: rounded in another order, or, in a half, to other neighbours."""


def sizes_of(problem: Problem, factor: str) -> list[int]:
    """The sizes of a factor in the inputs of a problem, in units that devices must not part."""
    dims = problem.owner.dimensions(problem.bound.call)
    pairs = [pair for name, a in named(problem.bound.inputs) for pair in zip(parse_dims(dims[name]), a.shape, strict=True)]
    return [size // dim.unit for dim, size in pairs if dim.factor == factor]


class Sharded:
    """A problem widened so that some of its factors divide over a mesh, with a spec for every array.

    Args:
        problem: what is computed.
        mesh: the devices.
        axes: the mesh axis that splits each of these factors.
        members: every array gets an axis of this size before its own, split by the mesh axis "data", and `pull` is mapped over it.
        beside: the first input that has one of the factors is split; all others are whole on every device.
    """

    def __init__(
        self,
        problem: Problem,
        mesh: Mesh,
        axes: Mapping[str, str],
        *,
        members: int | None = None,
        beside: bool = False,
    ) -> None:
        self.problem, self.mesh, self.axes, self.members = problem, mesh, dict(axes), members
        operation, call = problem.owner, problem.bound.call
        self.dims = {name: parse_dims(text) for name, text in operation.dimensions(call).items()}
        inputs = dict(named(problem.bound.inputs))
        self.copies = self._copies(inputs)
        self.inputs = operation.Inputs(
            **{**dict.fromkeys(operation.Inputs._fields), **{n: self._widened(n, a) for n, a in inputs.items()}}
        )
        self.split = [n for n, a in named(self.inputs) if any(self._axes_of(n, a.shape))][: 1 if beside else None]
        self.request = problem.request().reshaped(self.inputs)
        outputs = operation.output_specs(self.request.call)
        rng = np.random.default_rng(0)
        visible = operation.public(call)
        self.cotangents = {
            n: jnp.asarray(rng.standard_normal(s.shape), s.dtype) for n, s in named(outputs) if n in visible and has_gradient(s)
        }
        if not beside:
            self.split += [n for n, _ in named(outputs)]

    def _widened(self, name: str, array: Any) -> Any:
        """The array repeated along the factors that do not divide in every array, each time a little smaller."""
        for place, dim in enumerate(self.dims[name]):
            copies = self.copies.get(dim.factor, 1)
            if copies > 1 and not (array.shape[place] == 1 and dim.broadcasts):
                factors = [1 - copy / (2 * copies) if has_gradient(array) else 1 for copy in range(copies)]
                array = jnp.concatenate([array * jnp.asarray(factor, array.dtype) for factor in factors], place)
        return array

    def _copies(self, inputs: Mapping[str, Any]) -> dict[str, int]:
        """How often each factor that is split is repeated, in all arrays alike, so that heads keep their groups."""
        found: dict[str, int] = {}
        for factor, axis in self.axes.items():
            pieces = self.mesh.shape[axis]
            pairs = [pair for name, array in inputs.items() for pair in zip(self.dims[name], array.shape, strict=True)]
            own = [(dim, size) for dim, size in pairs if dim.factor == factor and not (size == 1 and dim.broadcasts)]
            found[factor] = 1 if all(dim.divides(size, pieces) for dim, size in own) else pieces
        return found

    def _axes_of(self, name: str, shape: tuple[int, ...]) -> list[str | None]:
        own = shape[len(shape) - len(self.dims[name]) :]
        return [self.axes.get(dim.factor) if size != 1 else None for dim, size in zip(self.dims[name], own, strict=True)]

    def spec(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """How an array is split."""
        leading = () if self.members is None else ("data",)
        return PartitionSpec(*leading, *(self._axes_of(name, shape) if name in self.split else ()))

    @property
    def differentiable(self) -> dict[str, Any]:
        """The inputs that have gradients."""
        return self.problem.owner.moving(self.inputs)

    def pull(self, inputs: dict[str, Any], cotangents: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Public outputs and gradients, from all canonical inputs."""
        return self._pull(inputs, cotangents) if self.members is None else jax.vmap(self._pull)(inputs, cotangents)

    def _pull(self, inputs: dict[str, Any], cotangents: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._with_gradients(self._outputs(inputs), inputs, cotangents)

    def _outputs(self, inputs: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
        operation = self.problem.owner
        full = operation.Inputs(**{**dict.fromkeys(operation.Inputs._fields), **inputs})
        request = self.request.reshaped(full)
        return lambda values: dict(named(operation.run(request, full._replace(**values))))

    def _local_outputs(self, inputs: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """Inside `jax.shard_map`, where the sums of what an output lacks are the caller's."""
        outputs = self._outputs(inputs)

        def summed(name: str, output: Any) -> Any:
            lacking = tuple(axis for factor, axis in self.axes.items() if factor not in {dim.factor for dim in self.dims[name]})
            return jax.lax.psum(output, lacking) if lacking else output

        return lambda values: {name: summed(name, output) for name, output in outputs(values).items()}

    def _with_gradients(
        self, outputs: Callable[[dict[str, Any]], dict[str, Any]], inputs: dict[str, Any], cotangents: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        def with_all(values: dict[str, Any]) -> Any:
            got = outputs(values)
            return {name: got[name] for name in cotangents}, got

        found, pullback, got = jax.vjp(with_all, {name: inputs[name] for name in self.differentiable}, has_aux=True)
        if explicit_mesh_of(found) is not None and self.members is None:  # their types must agree
            cotangents = {n: jax.sharding.reshard(c, jax.typeof(found[n]).sharding) for n, c in cotangents.items()}
        return got, pullback(cotangents)[0]

    def mapped(self, *, check_vma: bool) -> Callable[..., Any]:
        """What `pull` does, in one `jax.shard_map`: with `check_vma` gradients are formed inside of it, where those of whole inputs
        are then summed; otherwise the outputs are, and differentiated from without."""
        arguments = self.arguments(sharded=False)
        inputs, cotangents = ({n: self.spec(n, a.shape) for n, a in values.items()} for values in arguments)
        visible = self.problem.owner.public(self.request.call)
        specs = named(self.problem.owner.output_specs(self.request.call))
        outputs = {n: self.spec(n, s.shape) for n, s in specs if n in visible}

        def inside(values: dict[str, Any], cotangents: dict[str, Any]) -> Any:
            return self._with_gradients(self._local_outputs(values), values, cotangents)

        def outside(values: dict[str, Any], cotangents: dict[str, Any]) -> Any:
            local = jax.shard_map(
                lambda values: self._local_outputs(values)({}),
                mesh=self.mesh,
                in_specs=(inputs,),
                out_specs=outputs,
                check_vma=False,
            )
            return self._with_gradients(lambda moving: local({**values, **moving}), values, cotangents)

        if not check_vma:
            return outside
        gradients = {n: inputs[n] for n in self.differentiable}
        return jax.shard_map(inside, mesh=self.mesh, in_specs=(inputs, cotangents), out_specs=(outputs, gradients))

    def arguments(self, sharded: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Inputs and cotangents, on the mesh if `sharded`."""

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

    def check(self, run: Any, arguments: tuple[Any, Any], *, may_gather: bool = False) -> tuple[Any, Any]:
        """Run it, assert that it gives what one device gives and gathers nothing, and return outputs and gradients."""
        expected = jax.jit(self.pull)(*self.arguments(sharded=False))
        compiled = jax.jit(run).lower(*arguments).compile()
        gathers = re.findall(r"(?m)^.*= .* all-gather(?:-start)?\(.*$", compiled.as_text() or "")
        assert may_gather or not gathers, f"{self.problem.operation} gathers:\n" + "\n".join(gathers[:3])
        found = compiled(*arguments)
        for kind, got, want in zip(("output", "gradient"), found, expected, strict=True):
            for name, value in got.items():
                check_close(f"{kind} {name}", jax.device_get(value), jax.device_get(want[name]), SAME[self.problem.dtype])
        return found
