"""One phase over many devices: each shard runs its own local call, by the operation's sharding rule.

Three situations: axes that are already manual (inside `shard_map`) need nothing; explicit meshes go through `shard_map`; Auto
meshes are left to XLA for implementations made of plain JAX, and go through `custom_partitioning` for opaque kernels, except on
TPU, which has no such thing.
`custom_partitioning` puts a pointer into the program, which defeats JAX's persistent cache, so it is used for nothing else.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel.call.arrays import Dim, named, parse_dims
from ejkernel.call.contract import Contract

Run = Callable[..., Any]


def unify_manual_axes(inputs: Any) -> Any:
    """Inside `shard_map`, make all inputs vary over the same mesh axes, so that replicated ones get summed gradients."""
    return vary_like(inputs, inputs)


def vary_like(values: Any, arrays: Any) -> Any:
    """Mark values as varying over every manual mesh axis that one of the arrays varies over.

    A kernel's results depend on all of its operands, but not every primitive that calls a kernel says so in its types.
    """
    varying = frozenset().union(*(_varying(leaf) for leaf in jax.tree.leaves(arrays)))
    return jax.tree.map(lambda leaf: vary(leaf, varying), values) if varying else values


def vary(array: Any, axes: frozenset[str]) -> Any:
    """Mark an array as varying over these manual mesh axes."""
    missing = tuple(sorted(axes - _varying(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def _varying(array: Any) -> frozenset[str]:
    return jax.typeof(array).manual_axis_type.varying  # pyright: ignore[reportAttributeAccessIssue]


def mesh_of(arrays: Any) -> Any:
    """The mesh with more than one device that these arrays live on and that is not wholly manual; None if there is none."""
    for leaf in jax.tree.leaves(arrays):
        mesh = getattr(jax.typeof(leaf).sharding, "mesh", None)
        if mesh is not None and not mesh.empty and mesh.size > 1:
            return mesh if any(mesh.shape[axis] > 1 for axis in (*mesh.auto_axes, *mesh.explicit_axes)) else None
    return None


MIXED_AXES = (
    "inside a shard_map that leaves some mesh axes to XLA, which cannot split a kernel there; make all axes manual, or all Auto"
)


AUTO_ON_TPU = (
    "on a mesh of Auto axes, where JAX gives the TPU's compiler no way to split a kernel; call it inside jax.shard_map over all "
    "axes, or make them Explicit"
)


def is_mixed(mesh: Any) -> bool:
    """Whether some axes are manual (or explicit) while others are left to XLA, where `custom_partitioning` does not work."""
    automatic = any(mesh.shape[axis] > 1 for axis in mesh.auto_axes)
    return automatic and bool(mesh.manual_axes or mesh.explicit_axes)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The dims of the arrays of one phase, as flat lists beside the arrays' leaves."""

    arguments: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    shardable: tuple[str, ...]

    @classmethod
    def of(cls, operation: Contract, call: Any, arguments: Sequence[Any], results: Any) -> Layout:
        dims = {name: parse_dims(text) for name, text in operation.dimensions(call).items()}
        flat = tuple(dims[name] for values in arguments for name, _ in named(values))
        return cls(flat, tuple(dims[name] for name, _ in named(results)), operation.shardable)

    def assign(self, shapes: Sequence[tuple[int, ...]], specs: Sequence[Any], mesh: Any) -> dict[str, tuple[str, ...]]:
        """Mesh axes for each shardable factor: those of the first array that splits it, if every array can follow."""
        assigned: dict[str, tuple[str, ...]] = {}
        for dims, spec in zip(self.arguments, specs, strict=True):
            for dim, axes in zip(dims, _padded(spec, len(dims)), strict=True):
                taken = set(itertools.chain.from_iterable(assigned.values()))
                if axes and dim.factor in self.shardable and dim.factor not in assigned and not taken & set(axes):
                    assigned[dim.factor] = axes
        return {factor: axes for factor, axes in assigned.items() if self._divides(factor, axes, shapes, mesh)}

    def _divides(self, factor: str, axes: tuple[str, ...], shapes: Sequence[tuple[int, ...]], mesh: Any) -> bool:
        shards = _shards(axes, mesh)
        sizes = [
            size
            for dims, shape in zip(self.arguments, shapes, strict=True)
            for dim, size in zip(dims, shape, strict=True)
            if dim.factor == factor and size != 1
        ]
        return bool(sizes) and all(size % shards == 0 for size in sizes)

    def specs(self, dims_of: Sequence[tuple[Dim, ...]], shapes: Sequence[tuple[int, ...]], assigned: Mapping[str, Any]) -> Any:
        """A PartitionSpec for each array."""
        return tuple(
            PartitionSpec(*(assigned.get(dim.factor) if size != 1 else None for dim, size in zip(dims, shape, strict=True)))
            for dims, shape in zip(dims_of, shapes, strict=True)
        )

    def summed(self, dims: tuple[Dim, ...], shape: tuple[int, ...], assigned: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """Mesh axes over which each shard holds only a part of this result."""
        split = {dim.factor for dim, size in zip(dims, shape, strict=True) if size != 1}
        return tuple(axis for factor, axes in assigned.items() if factor not in split for axis in axes)


def _padded(spec: Any, rank: int) -> list[tuple[str, ...]]:
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec or ()]
    return entries + [()] * (rank - len(entries))


def _shards(axes: tuple[str, ...], mesh: Any) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def run_explicit(layout: Layout, mesh: Any, run: Run, arguments: tuple[Any, ...], results: Any) -> Any:
    """Run a phase on an explicit mesh: reshard what the rule cannot split, then one local call per shard."""
    leaves, tree = jax.tree.flatten(arguments)
    shapes = [leaf.shape for leaf in leaves]
    assigned = layout.assign(shapes, [jax.typeof(leaf).sharding.spec for leaf in leaves], mesh)
    in_specs = layout.specs(layout.arguments, shapes, assigned)
    leaves = [jax.sharding.reshard(leaf, NamedSharding(mesh, spec)) for leaf, spec in zip(leaves, in_specs, strict=True)]
    result_shapes = [leaf.shape for leaf in jax.tree.leaves(results)]
    axes = frozenset(itertools.chain.from_iterable(assigned.values()))

    def local(*leaves: Any) -> Any:
        outputs = run(*jax.tree.unflatten(tree, [vary(leaf, axes) for leaf in leaves]))
        return tuple(_sum_parts(layout, jax.tree.leaves(outputs), result_shapes, assigned))

    out_specs = layout.specs(layout.results, result_shapes, assigned)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=frozenset(mesh.explicit_axes))
    return jax.tree.unflatten(jax.tree.structure(results), sharded(*leaves))


def placed_like(values: Any, arrays: Any, mesh: Any) -> Any:
    """Gradients on an explicit mesh, each resharded as the array of the same name is: their types must agree. That of an array
    which is not on the mesh is whole on every device, as JAX has it."""
    placed = {name: jax.typeof(array).sharding for name, array in named(arrays)}
    whole = NamedSharding(mesh, PartitionSpec())
    shardings = {name: whole if sharding.mesh.empty else sharding for name, sharding in placed.items()}
    return values._replace(**{name: jax.sharding.reshard(value, shardings[name]) for name, value in named(values)})


def _sum_parts(layout: Layout, leaves: Sequence[Any], shapes: Sequence[Any], assigned: Mapping[str, Any]) -> list[Any]:
    summed = []
    for dims, shape, leaf in zip(layout.results, shapes, leaves, strict=True):
        axes = layout.summed(dims, shape, assigned)
        summed.append(jax.lax.psum(leaf, axes) if axes else leaf)
    return summed


def run_auto(layout: Layout, run: Run, arguments: tuple[Any, ...], results: Any) -> Any:
    """Run an opaque phase on an Auto mesh: XLA chooses shardings, the rule says which it may choose."""
    from jax.experimental.custom_partitioning import custom_partitioning

    leaves, tree = jax.tree.flatten(arguments)
    shapes = [leaf.shape for leaf in leaves]
    result_leaves, result_tree = jax.tree.flatten(results)
    result_shapes = [leaf.shape for leaf in result_leaves]

    def flat(*leaves: Any) -> Any:
        return tuple(jax.tree.leaves(run(*jax.tree.unflatten(tree, leaves))))

    def partition(mesh: Any, arg_infos: Any, result_infos: Any) -> Any:
        assigned = layout.assign(shapes, [info.sharding.spec for info in arg_infos], mesh)

        def local(*leaves: Any) -> Any:
            return tuple(_sum_parts(layout, flat(*leaves), result_shapes, assigned))

        def shardings(dims: Any, shapes: Any) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, spec) for spec in layout.specs(dims, shapes, assigned))

        return mesh, local, shardings(layout.results, result_shapes), shardings(layout.arguments, shapes)

    partitioned = custom_partitioning(flat)
    rule = sharding_rule(layout, shapes, result_shapes)
    partitioned.def_partition(partition, sharding_rule=rule.text, need_replication_factors=rule.whole, **cast(Any, rule.sizes))
    return jax.tree.unflatten(result_tree, partitioned(*leaves))


class Rule(NamedTuple):
    """A Shardy rule in text, the factors that must stay whole, and the sizes of those that appear in products only."""

    text: str
    whole: tuple[str, ...]
    sizes: dict[str, int]


def sharding_rule(layout: Layout, shapes: Sequence[Any], result_shapes: Sequence[Any]) -> Rule:
    """The rule of a phase, `"b t h d, ... -> b t h d"`.

    A factor whose size differs between arrays (query heads over key heads) is split as `(h g)` where it is larger.
    """
    fresh = (a + b for a, b in itertools.product(string.ascii_lowercase, repeat=2))
    whole: list[str] = []
    arrays = [*zip(layout.arguments, shapes, strict=True), *zip(layout.results, result_shapes, strict=True)]
    smallest: dict[str, int] = {}
    for dims, shape in arrays:
        for dim, size in zip(dims, shape, strict=True):
            if dim.factor in layout.shardable and size != 1:
                smallest[dim.factor] = min(size, smallest.get(dim.factor, size))
    names = {factor: next(fresh) for factor in smallest}
    groups: dict[tuple[str, int], str] = {}

    def word(dim: Dim, size: int) -> str:
        if size == 1 or dim.factor not in layout.shardable:
            whole.append(next(fresh))
            return whole[-1]
        ratio = size // smallest[dim.factor]
        if ratio == 1:
            return names[dim.factor]
        if (dim.factor, ratio) not in groups:
            whole.append(groups.setdefault((dim.factor, ratio), next(fresh)))
        return f"({names[dim.factor]} {groups[dim.factor, ratio]})"

    sides = [" ".join(word(dim, size) for dim, size in zip(dims, shape, strict=True)) for dims, shape in arrays]
    count = len(layout.arguments)
    text = ", ".join(sides[:count]) + " -> " + ", ".join(sides[count:])
    return Rule(text, tuple(whole), {name: ratio for (_, ratio), name in groups.items()})
