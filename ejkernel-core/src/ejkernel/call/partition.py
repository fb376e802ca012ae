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
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.call.arrays import ArraySpec, Dim, named, parse_dims
from ejkernel.call.contract import Contract
from ejkernel.plugin import Phase

Run = Callable[..., Any]
Axes = tuple[str, ...]


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
    """The mesh that these arrays live on, if something is left to split there: explicit axes, or Auto ones of several devices.

    Explicit axes count whatever their size: they are part of the arrays' types, which kernels know nothing of.
    """
    for leaf in jax.tree.leaves(arrays):
        mesh = getattr(jax.typeof(leaf).sharding, "mesh", None)
        if mesh is not None and not mesh.empty:
            return mesh if mesh.explicit_axes or any(mesh.shape[axis] > 1 for axis in mesh.auto_axes) else None
    return None


def explicit_mesh_of(arrays: Any) -> Any:
    """The mesh that these arrays live on, if it has explicit axes that are not manual; None otherwise."""
    mesh = mesh_of(arrays)
    return mesh if mesh is not None and mesh.explicit_axes else None


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
    """The dims of the arrays of one phase, as flat lists beside the arrays' leaves.

    `sources`: for each result the dims of the one argument of which it is a multiple; None if it depends on all of them.
    """

    arguments: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    shardable: tuple[str, ...]
    sources: tuple[tuple[Dim, ...] | None, ...]

    @classmethod
    def of(cls, operation: Contract, call: Any, phase: Phase, arguments: Sequence[Any], results: Any) -> Layout:
        dims = {name: parse_dims(text) for name, text in operation.dimensions(call).items()}
        flat = tuple(dims[name] for values in arguments for name, _ in named(values))
        early = operation.formed_early if phase == "backward" else {}
        sources = tuple(dims[early[name]] if name in early else None for name, _ in named(results))
        return cls(flat, tuple(dims[name] for name, _ in named(results)), operation.shardable, sources)

    @property
    def is_inferable(self) -> bool:
        """Whether JAX can infer which results are whole on every device; not what is a multiple of something whole."""
        return not any(self.sources)

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
        pieces = shards(axes, mesh)
        divides = [
            dim.divides(size, pieces)
            for dims, shape in zip(self.arguments, shapes, strict=True)
            for dim, size in zip(dims, shape, strict=True)
            if dim.factor == factor and size != 1
        ]
        return bool(divides) and all(divides)

    def specs(self, dims_of: Sequence[tuple[Dim, ...]], shapes: Sequence[tuple[int, ...]], assigned: Mapping[str, Any]) -> Any:
        """A PartitionSpec for each array."""
        return tuple(
            PartitionSpec(*(assigned.get(dim.factor) if size != 1 else None for dim, size in zip(dims, shape, strict=True)))
            for dims, shape in zip(dims_of, shapes, strict=True)
        )

    def summed(self, index: int, shape: tuple[int, ...], assigned: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """Mesh axes over which each shard holds only a part of the result of this index."""
        split = {dim.factor for dim, size in zip(self.results[index], shape, strict=True) if size != 1}
        source = self.sources[index]
        parts = {*assigned} if source is None else {dim.factor for dim in source}
        return tuple(axis for factor, axes in assigned.items() if factor in parts - split for axis in axes)


def _padded(spec: Any, rank: int) -> list[tuple[str, ...]]:
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec or ()]
    return entries + [()] * (rank - len(entries))


def shards(axes: Axes, mesh: Any) -> int:
    """Into how many these mesh axes split."""
    return math.prod(mesh.shape[axis] for axis in axes)


@dataclasses.dataclass(frozen=True)
class _Phase:
    """A phase as a function of the arrays that have elements, flat.

    Arrays without any stay out of what is split, for the reason that `shard_map` names.
    """

    layout: Layout
    run: Run
    leaves: tuple[Any, ...]
    tree: Any
    results: tuple[ArraySpec, ...]
    result_tree: Any

    @classmethod
    def of(cls, layout: Layout, run: Run, arguments: tuple[Any, ...], results: Any) -> _Phase:
        leaves, tree = jax.tree.flatten(arguments)
        result_leaves, result_tree = jax.tree.flatten(results)
        return cls(layout, run, tuple(leaves), tree, tuple(result_leaves), result_tree)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [leaf.shape for leaf in self.leaves]

    @property
    def result_shapes(self) -> list[tuple[int, ...]]:
        return [result.shape for result in self.results]

    def kept(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Those of one value for each argument whose argument has elements."""
        return tuple(value for value, leaf in zip(values, self.leaves, strict=True) if 0 not in leaf.shape)

    def kept_results(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Those of one value for each result whose result has elements."""
        return tuple(value for value, result in zip(values, self.results, strict=True) if 0 not in result.shape)

    def local(self, kept: Sequence[Any], assigned: Mapping[str, tuple[str, ...]], mesh: Any) -> tuple[Any, ...]:
        """The results of one shard that have elements, from the arguments that have; sums of parts are formed."""
        given, axes = iter(kept), frozenset(itertools.chain.from_iterable(assigned.values()))
        leaves = [
            jnp.zeros(_local_shape(dims, leaf.shape, assigned, mesh), leaf.dtype) if 0 in leaf.shape else next(given)
            for dims, leaf in zip(self.layout.arguments, self.leaves, strict=True)
        ]
        manual = axes if mesh is not None and mesh.explicit_axes and self.layout.is_inferable else frozenset[str]()
        outputs = self.run(*jax.tree.unflatten(self.tree, [vary(leaf, manual) for leaf in leaves]))
        found = jax.tree.leaves(outputs)
        return self.kept_results(_sum_parts(self.layout, found, self.result_shapes, assigned))

    def whole(self, kept: Sequence[Any], specs: Sequence[PartitionSpec], mesh: Any) -> Any:
        """The results in their tree, with those that have no elements."""
        given = iter(kept)
        pairs = zip(self.results, specs, strict=True)
        leaves = [_empty(result, spec, mesh) if 0 in result.shape else next(given) for result, spec in pairs]
        return jax.tree.unflatten(self.result_tree, leaves)


def _local_shape(dims: Sequence[Dim], shape: Sequence[int], assigned: Mapping[str, tuple[str, ...]], mesh: Any) -> list[int]:
    return [
        size if size == 1 or dim.factor not in assigned else size // shards(assigned[dim.factor], mesh)
        for dim, size in zip(dims, shape, strict=True)
    ]


def run_explicit(layout: Layout, mesh: Any, run: Run, arguments: tuple[Any, ...], results: Any) -> Any:
    """Run a phase on an explicit mesh: reshard what the rule cannot split, then one local call per shard."""
    phase = _Phase.of(layout, run, arguments, results)
    assigned = layout.assign(phase.shapes, [entries_of(leaf) for leaf in phase.leaves], mesh)
    in_specs = phase.kept(layout.specs(layout.arguments, phase.shapes, assigned))
    kept = zip(phase.kept(phase.leaves), in_specs, strict=True)
    placed = [jax.sharding.reshard(leaf, NamedSharding(mesh, spec)) for leaf, spec in kept]
    out_specs = layout.specs(layout.results, phase.result_shapes, assigned)
    sharded = jax.shard_map(
        lambda *leaves: phase.local(leaves, assigned, mesh),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=phase.kept_results(out_specs),
        axis_names=_free_axes(mesh),
        check_vma=layout.is_inferable,
    )
    return vary_like(phase.whole(sharded(*placed), out_specs, mesh), arguments)


def entries_of(array: Any) -> list[Axes]:
    """The mesh axes that split each axis of an array, by its type; none if it is on no mesh."""
    sharding = jax.typeof(array).sharding
    return _padded(None if sharding.mesh.empty else sharding.spec, len(array.shape))


def placed_on(mesh: Any, array: Any, entries: Sequence[Axes]) -> Any:
    """The array, resharded so that these mesh axes split its axes."""
    return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec(*(axes or None for axes in entries))))


def map_shards(
    function: Run, mesh: Any, arrays: Sequence[Any], entries: Sequence[Sequence[Axes]], result: Sequence[Axes]
) -> Any:
    """A function of the shards of arrays on an explicit mesh, split by their `entries`; `result` says how its result is split."""
    *in_specs, out_specs = (PartitionSpec(*(axes or None for axes in each)) for each in (*entries, result))
    placed = [placed_on(mesh, array, each) for array, each in zip(arrays, entries, strict=True)]
    return shard_map(function, placed, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=_free_axes(mesh))


def shard_map(function: Run, arrays: Sequence[Any], *, mesh: Any, in_specs: Any, out_specs: Any, **options: Any) -> Any:
    """`jax.shard_map(function, ...)(*arrays)` into which, and out of which, only arrays with elements go.

    Those without any are made where they are needed: XLA drops them from a manual computation but not from its list of
    shardings, and its compiler then dies of a null pointer.
    """
    arrays = tuple(arrays)
    leaves, tree = jax.tree.flatten(arrays)
    if all(math.prod(leaf.shape) for leaf in leaves):
        return jax.shard_map(function, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, **options)(*arrays)
    specs = _broadcast(tuple(in_specs), arrays)
    kept = [(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True) if math.prod(leaf.shape)]

    def local(*given: Any) -> Any:
        rest = iter(given)
        pairs = zip(leaves, specs, strict=True)
        whole = [next(rest) if math.prod(leaf.shape) else _empty_shard(leaf, spec, mesh) for leaf, spec in pairs]
        return function(*jax.tree.unflatten(tree, whole))

    def mapped(local: Run, out_specs: Any) -> Run:
        return jax.shard_map(local, mesh=mesh, in_specs=tuple(spec for _, spec in kept), out_specs=out_specs, **options)

    given = [leaf for leaf, _ in kept]
    results, result_tree = jax.tree.flatten(jax.eval_shape(mapped(local, out_specs), *given))
    result_specs = _broadcast(out_specs, jax.tree.unflatten(result_tree, results))
    full = [math.prod(result.shape) > 0 for result in results]

    def local_with_elements(*given: Any) -> list[Any]:
        return [leaf for leaf, is_full in zip(jax.tree.leaves(local(*given)), full, strict=True) if is_full]

    full_specs = [spec for spec, is_full in zip(result_specs, full, strict=True) if is_full]
    found = iter(mapped(local_with_elements, full_specs)(*given))
    empty = (_empty(result, spec, mesh) for result, spec in zip(results, result_specs, strict=True))
    made = [next(found) if is_full else zeros for is_full, zeros in zip(full, empty, strict=True)]
    return jax.tree.unflatten(result_tree, made)


def _broadcast(specs: Any, values: Any) -> list[PartitionSpec]:
    """A spec for each leaf, from a prefix of the tree."""

    def is_spec(node: Any) -> bool:
        return isinstance(node, PartitionSpec)

    return jax.tree.leaves(jax.tree.broadcast(specs, values, is_leaf=is_spec), is_leaf=is_spec)


def _empty_shard(array: Any, spec: PartitionSpec, mesh: Any) -> Any:
    """A device's part of an array without elements."""
    entries = _padded(spec, len(array.shape))
    shape = [size // shards(axes, mesh) for size, axes in zip(array.shape, entries, strict=True)]
    return vary(jnp.zeros(shape, array.dtype), frozenset(itertools.chain.from_iterable(entries)))


def _empty(result: Any, spec: PartitionSpec, mesh: Any) -> Any:
    """A result without elements, split as the spec says where that is part of its type."""
    zeros = jnp.zeros(result.shape, result.dtype)
    return jax.sharding.reshard(zeros, NamedSharding(mesh, spec)) if mesh.explicit_axes else zeros


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Absent:
    """In the place of an array without elements."""

    aval: Any

    def made(self) -> Any:
        zeros, sharding = jnp.zeros(self.aval.shape, self.aval.dtype), self.aval.sharding
        if not sharding.mesh.empty and sharding.mesh.explicit_axes:
            zeros = jax.sharding.reshard(zeros, sharding)
        return vary(zeros, self.aval.manual_axis_type.varying)


def without_empty(values: Any) -> Any:
    """Residuals without their arrays that have no elements: those of a `shard_map` that is differentiated leave it and come into
    another one, which is where XLA's compiler dies of them."""
    return jax.tree.map(lambda leaf: _Absent(jax.typeof(leaf)) if 0 in leaf.shape else leaf, values)


def with_empty(values: Any) -> Any:
    """What `without_empty` was given."""
    return jax.tree.map(
        lambda leaf: leaf.made() if isinstance(leaf, _Absent) else leaf, values, is_leaf=lambda leaf: isinstance(leaf, _Absent)
    )


def _free_axes(mesh: Any) -> frozenset[str]:
    """The explicit axes that no `jax.vmap` around has taken for what it maps over.

    JAX refuses a `shard_map` over a taken one, and says it in no other way.
    """

    def is_free(axis: str) -> bool:
        try:
            jax.shard_map(tuple, mesh=mesh, in_specs=(), out_specs=(), axis_names={axis})()
        except ValueError:
            return False
        return True

    return frozenset(filter(is_free, mesh.explicit_axes))


def is_mapped(mesh: Any) -> bool:
    """Whether a `jax.vmap` around has taken some of the explicit axes."""
    return len(_free_axes(mesh)) < len(mesh.explicit_axes)


def placed_like(values: Any, arrays: Any, mesh: Any) -> Any:
    """Gradients on an explicit mesh, each resharded as the array of the same name is: their types must agree. That of an array
    which is not on the mesh is whole on every device, as JAX has it."""
    placed = {name: jax.typeof(array).sharding for name, array in named(arrays)}
    whole = NamedSharding(mesh, PartitionSpec())
    shardings = {name: whole if sharding.mesh.empty else sharding for name, sharding in placed.items()}
    return values._replace(**{name: jax.sharding.reshard(value, shardings[name]) for name, value in named(values)})


def _sum_parts(layout: Layout, leaves: Sequence[Any], shapes: Sequence[Any], assigned: Mapping[str, Any]) -> list[Any]:
    summed = []
    for index, (shape, leaf) in enumerate(zip(shapes, leaves, strict=True)):
        axes = layout.summed(index, shape, assigned)
        summed.append(jax.lax.psum(leaf, axes) if axes else leaf)
    return summed


def run_auto(layout: Layout, run: Run, arguments: tuple[Any, ...], results: Any) -> Any:
    """Run an opaque phase on an Auto mesh: XLA chooses shardings, the rule says which it may choose."""
    from jax.experimental.custom_partitioning import custom_partitioning

    phase = _Phase.of(layout, run, arguments, results)
    axes = mesh_of(arguments)
    restricted = dataclasses.replace(
        layout,
        arguments=phase.kept(layout.arguments),
        results=phase.kept_results(layout.results),
        sources=phase.kept_results(layout.sources),
    )
    shapes, result_shapes = phase.kept(phase.shapes), phase.kept_results(phase.result_shapes)
    whole = [PartitionSpec() for _ in phase.results]
    if not result_shapes:  # a computation without results has no rule
        return phase.whole((), whole, axes)
    if not shapes:  # nor has one without operands, whose results do not depend on the mesh
        return phase.whole(phase.local((), {}, None), whole, axes)

    def flat(*leaves: Any) -> Any:
        return phase.local(leaves, {}, None)

    def partition(mesh: Any, arg_infos: Any, result_infos: Any) -> Any:
        mesh = mesh if not mesh.empty else _mesh_like(axes, arg_infos[0].sharding)
        found = [_spec_of(info.sharding, mesh, shape) for info, shape in zip(arg_infos, shapes, strict=True)]
        given = iter(found)
        specs = [PartitionSpec() if 0 in shape else next(given) for shape in phase.shapes]
        assigned = layout.assign(phase.shapes, specs, mesh)

        def local(*leaves: Any) -> Any:
            return phase.local(leaves, assigned, mesh)

        def shardings(dims: Any, shapes: Any) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, spec) for spec in layout.specs(dims, shapes, assigned))

        return mesh, local, shardings(restricted.results, result_shapes), shardings(restricted.arguments, shapes)

    # a program of its own holds the arrays that the code makes, such as tables: custom_partitioning refuses those
    partitioned = custom_partitioning(jax.jit(flat))
    rule = sharding_rule(restricted, shapes, result_shapes)
    partitioned.def_partition(partition, sharding_rule=rule.text, need_replication_factors=rule.whole, **cast(Any, rule.sizes))
    return phase.whole(partitioned(*phase.kept(phase.leaves)), whole, axes)


def _mesh_like(mesh: Any, sharding: Any) -> Mesh:
    """The mesh of a program whose arguments are not on it: JAX then hands on the devices in its order, but not the mesh."""
    devices = np.array([*sharding.devices_indices_map((1,) * 0)])
    if devices.size != mesh.size:
        return Mesh(devices, ("devices",))
    return Mesh(devices.reshape(mesh.axis_sizes), mesh.axis_names)


def _spec_of(sharding: Any, mesh: Any, shape: tuple[int, ...]) -> Any:
    """The spec by which a sharding splits an array over the mesh; one of whole axes where none does."""
    if isinstance(sharding, NamedSharding):
        return sharding.spec
    where = sharding.devices_indices_map(shape)
    starts = np.array([[index.start or 0 for index in where[device]] for device in mesh.devices.flat])
    starts = starts.reshape(*mesh.devices.shape, len(shape))
    steps: list[list[tuple[int, str]]] = [[] for _ in shape]
    for place, axis in enumerate(mesh.axis_names):
        if mesh.shape[axis] > 1:
            step = np.take(starts, 1, place).reshape(-1, len(shape))[0] - starts.reshape(-1, len(shape))[0]
            for dim in np.flatnonzero(step):
                steps[dim].append((step[dim], axis))
    spec = PartitionSpec(*(tuple(axis for _, axis in sorted(found, reverse=True)) or None for found in steps))
    taken = [axis for found in steps for _, axis in found]
    if len(taken) != len({*taken}) or NamedSharding(mesh, spec).devices_indices_map(shape) != where:
        return PartitionSpec()
    return spec


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
