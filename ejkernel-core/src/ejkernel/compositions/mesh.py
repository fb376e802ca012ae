"""`mesh=, in_specs=, out_specs=` of the public functions: one `jax.shard_map` around the local call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ejkernel._dispatch.explanation import capturing
from ejkernel.call.partition import shard_map
from ejkernel.call.traced import split_traced, with_traced
from ejkernel.errors import invalid, wrong_type


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The static part of a sharded call; the key under which its program is cached."""

    function: Callable[..., Any]
    options: tuple[tuple[str, Any], ...]
    mesh: Any
    specs: tuple[tuple[str, tuple[PartitionSpec, ...], Any], ...]  # leaves and structure, as pytrees cannot be hashed
    out_specs: Any

    def local(self, arrays: Mapping[str, Any]) -> Any:
        return self.function(**with_traced(arrays, {name: restored(value) for name, value in self.options}))


def over_mesh(
    function: Callable[..., Any],
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    positional: Sequence[str] | None = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    dims: Any = None,
    derived: Callable[[Mapping[str, Any], Mapping[str, PartitionSpec]], Mapping[str, Any]] | None = None,
    following: Sequence[str] = (),
    **settings: Any,
) -> Any:
    """`function(**arrays, **options)`, inside `jax.shard_map` when there is a mesh.

    Args:
        function: a function of the module level; it is part of the key under which the program is cached.
        arrays: its array arguments; None where absent.
        options: its other arguments, hashable or traced.
        positional: names of the array arguments in the order of `in_specs`; an entry that `arrays` lacks takes a spec too.
            None means all of them.
        mesh: a `jax.sharding.Mesh` or None.
        in_specs: one PartitionSpec or None (whole on every device) for each positional array.
        out_specs: a PartitionSpec, or a tuple of them for several results.
        dims: the axes of every positional array, as `"b t h d"`: b and h may be split, alike in all arrays; others may not.
            Without, any may.
        derived: from all arrays and the specs of `positional` ones, specs of others; those it leaves out are whole.
        following: arrays that `derived` gives a spec if in_specs has none.
        **settings: more options: `platform` and `cfg`.
    """
    options = {**options, **settings}
    if not is_sharded(mesh, in_specs, out_specs) or capturing():
        return function(**arrays, **options)
    positional = tuple(arrays) if positional is None else positional
    specs: dict[str, Any] = {**named_specs(arrays, positional, in_specs, following)}
    specs |= {} if derived is None else derived(arrays, specs)
    if dims is not None:
        _check_split(arrays, specs, mesh, dims)
    traced, options = split_traced(options)
    options = {name: hashable(value) for name, value in options.items()}
    out_specs = tuple(out_specs) if isinstance(out_specs, list) else out_specs
    flat = {name: jax.tree.flatten(spec, is_leaf=_is_spec) for name, spec in specs.items()}
    listed = tuple((name, tuple(leaves), structure) for name, (leaves, structure) in flat.items())
    return _run(_Plan(function, tuple(options.items()), mesh, listed, out_specs), {**arrays, **traced})


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def _check_split(arrays: Mapping[str, Any], specs: Mapping[str, PartitionSpec], mesh: Any, dims: Mapping[str, str]) -> None:
    """Refuse specs under which devices would compute something else than the whole: they see neither other tokens nor heads."""
    found: dict[str, tuple[str, Any]] = {}
    for name, letters in dims.items():
        array = arrays.get(name)
        if array is None or len(getattr(array, "shape", ())) != len(letters.split()):
            continue
        entries = (*_without_single(specs.get(name, PartitionSpec()), mesh), *[None] * len(array.shape))
        for letter, entry, size in zip(letters.split(), entries, array.shape, strict=False):
            if letter not in ("b", "h") and entry is not None:
                raise invalid("in_specs", f"axis {letter} of {name} split over {entry}", "it whole on every device")
            if letter in ("b", "h") and size != 1:
                other, wanted = found.setdefault(letter, (name, entry))
                if entry != wanted:
                    got = f"axis {letter} of {name} split over {entry or 'nothing'}"
                    raise invalid("in_specs", got, f"{wanted or 'nothing'} as in {other}")


def _without_single(spec: PartitionSpec, mesh: Any) -> PartitionSpec:
    """The spec less the axes of one device, which split nothing but would make results count as varying along them."""
    kept: list[Any] = []
    for entry in spec:
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        several = tuple(axis for axis in axes if mesh.shape.get(axis, 2) > 1)
        kept.append(several[0] if len(several) == 1 else several or None)
    return PartitionSpec(*kept)


class _Knobs(tuple[tuple[str, Any], ...]):
    """A mapping (`cfg={"block_q": 64}`) as pairs, which can be part of a key."""


def hashable(value: Any) -> Any:
    """Lists as tuples and mappings as pairs; `restored` is the way back for mappings."""
    if isinstance(value, Mapping):
        return _Knobs(tuple((name, hashable(knob)) for name, knob in cast("Mapping[str, Any]", value).items()))
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value


def restored(value: Any) -> Any:
    """A mapping that `hashable` made pairs of, as a mapping; anything else as it is."""
    return dict(value) if isinstance(value, _Knobs) else value


@functools.partial(jax.jit, static_argnums=0)
def _run(plan: _Plan, arrays: dict[str, Any]) -> Any:
    absent = {name: None for name, value in arrays.items() if value is None}
    arrays = {name: value for name, value in arrays.items() if value is not None}
    specs = {name: jax.tree.unflatten(structure, leaves) for name, leaves, structure in plan.specs}
    in_specs = {name: specs.get(name) or jax.tree.map(lambda _: PartitionSpec(), value) for name, value in arrays.items()}
    return shard(lambda arrays: plan.local({**absent, **arrays}), arrays, plan.mesh, in_specs, plan.out_specs)


def shard(function: Callable[[Any], Any], arrays: Any, mesh: Any, in_specs: Any, out_specs: Any) -> Any:
    """`jax.shard_map` of a function of one pytree; on an explicit mesh its arrays are placed first, as shard_map demands.

    Mesh axes of one device split nothing: they are left out of in_specs, so that out_specs need not name them.
    """
    in_specs = jax.tree.map(lambda spec: _without_single(spec, mesh), in_specs, is_leaf=_is_spec)
    if AxisType.Explicit in mesh.axis_types:
        arrays = jax.tree.map(lambda leaf, spec: jax.sharding.reshard(leaf, NamedSharding(mesh, spec)), arrays, in_specs)
    return shard_map(function, (arrays,), mesh=mesh, in_specs=(in_specs,), out_specs=out_specs)


def with_rows(in_specs: Any, positional: Sequence[str]) -> Any:
    """in_specs and one more, for an array `[B]` after the positional ones: it is split as the first axis of the first array is."""
    if (
        isinstance(in_specs, PartitionSpec)
        or not isinstance(in_specs, (tuple, list))
        or not 0 < len(in_specs) <= len(positional)
    ):
        return in_specs
    given = cast("Sequence[PartitionSpec | None]", in_specs)
    rows = (*(given[0] or ()), None)[0]
    return (*given, *[None] * (len(positional) - len(given)), PartitionSpec(rows))


def is_sharded(mesh: Any, in_specs: Any, out_specs: Any) -> bool:
    """Whether there is a mesh; specs belong to one, and it to them.

    Raises:
        ValueError: one is given without the other, or a spec names an axis that the mesh lacks.
        TypeError: what is given is no mesh.
    """
    if mesh is not None and not isinstance(mesh, (Mesh, AbstractMesh)):
        raise wrong_type("mesh", type(mesh).__name__, "a jax.sharding.Mesh, or None")
    for name, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
        if mesh is None and specs is not None:
            raise invalid(name, specs, "None without a mesh", remedy="pass mesh= too")
        if mesh is not None and specs is None:
            raise invalid(name, None, "PartitionSpecs with mesh=")
        if mesh is not None:
            _check_axes(name, specs, mesh)
    return mesh is not None


def _check_axes(name: str, specs: Any, mesh: Any) -> None:
    """Refuse PartitionSpecs, in any pytree, that name an axis which the mesh lacks."""
    for spec in jax.tree.leaves(specs, is_leaf=_is_spec):
        for axis in jax.tree.leaves(tuple(spec)) if isinstance(spec, PartitionSpec) else ():
            if isinstance(axis, str) and axis not in mesh.axis_names:
                raise invalid(name, f"axis {axis!r}", f"axes of the mesh, {', '.join(map(repr, mesh.axis_names))}")


_WHOLE_AT_THE_END = ("attention_mask", "block_tables", "class_weights", "cu_seqlens", "seg_ids")
"""Arrays at the end that specs may stop short of, as those of clients do: they are whole then."""


def named_specs(
    arrays: Mapping[str, Any], positional: Sequence[str], in_specs: Any, following: Sequence[str] = ()
) -> dict[str, PartitionSpec]:
    """The spec of every present array that has one; None means whole, except for `following`, which are then left out."""
    if not isinstance(in_specs, (tuple, list)) or isinstance(in_specs, PartitionSpec):
        got = "a single PartitionSpec" if isinstance(in_specs, PartitionSpec) else type(in_specs).__name__
        raise wrong_type("in_specs", got, "a tuple with one PartitionSpec or None per array")
    if len(in_specs) > len(positional):
        raise invalid(
            "in_specs", f"{len(in_specs)} entries", f"at most {len(positional)}, one for each of {', '.join(positional)}"
        )
    spare = {*following, *_WHOLE_AT_THE_END, "bias", "softmax_aux"}
    lacking = [name for name in positional[len(in_specs) :] if arrays.get(name) is not None and name not in spare]
    if lacking:
        expected = f"one for each of {', '.join(positional[: positional.index(lacking[-1]) + 1])}; None = whole"
        raise invalid("in_specs", f"{len(in_specs)} entries, none for {', '.join(lacking)}", expected)
    specs: dict[str, PartitionSpec] = {}
    for name, spec in zip(positional, in_specs, strict=False):
        if spec is not None and not isinstance(spec, PartitionSpec):
            raise wrong_type("in_specs", f"{type(spec).__name__} for {name}", "a PartitionSpec or None")
        if arrays.get(name) is not None and not (spec is None and name in following):
            specs[name] = PartitionSpec() if spec is None else spec
    return specs
