"""`mesh=, in_specs=, out_specs=` of the attention functions: one `jax.shard_map` around the local call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import PartitionSpec

from ejkernel._dispatch.explanation import capturing
from ejkernel._pipeline.operation import static_options
from ejkernel.call.traced import split_traced, with_traced
from ejkernel.compositions import mesh as _mesh
from ejkernel.errors import invalid
from ejkernel.operations.flash_attention.dropout import as_dropout_rate, streams_of_seed

Axes = tuple[str, ...]
_FOLLOWING = ("bias", "softmax_aux")
"""Arrays that are split as the query is unless a spec says otherwise."""


class Invokable(Protocol):
    """An `Operation`, or what is called like one."""

    def invoke(
        self, arrays: Mapping[str, Any], options: Mapping[str, Any], *, platform: Any, cfg: Any, form: Callable[..., Any] | None
    ) -> Any: ...

    def check_values(self, arrays: Mapping[str, Any]) -> None: ...


@dataclasses.dataclass(frozen=True)
class _Local:
    """What every device runs; part of the key under which the program is cached."""

    operation: Invokable
    form: Callable[..., Any] | None
    options: tuple[str, ...]

    def __call__(self, *, platform: Any, cfg: Any, **given: Any) -> Any:
        options = {name: given.pop(name) for name in self.options}
        return self.operation.invoke(given, options, form=self.form, platform=platform, cfg=cfg)


def invoke(
    operation: Invokable,
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    positional: Sequence[str],
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    form: Callable[..., Any] | None = None,
    sequence_axes: Axes = (),
    platform: Any = None,
    cfg: Any = None,
) -> Any:
    """`operation.invoke`, inside `jax.shard_map` when there is a mesh.

    Args:
        operation, arrays, options, form: as in `Operation.invoke`.
        positional: names of the array arguments in the order of `in_specs`; an entry that `arrays` lacks takes a spec too.
        mesh: a `jax.sharding.Mesh` or None.
        in_specs: one PartitionSpec or None for each positional array. A bias or sinks without one are split as the query is.
        out_specs: a PartitionSpec, or a tuple of them for several results.
        sequence_axes: the mesh axes over which the lengths of queries and keys are split; without them they must be whole.
        platform, cfg: as in `Operation.invoke`.
    """
    if not _mesh.is_sharded(mesh, in_specs, out_specs) or capturing():
        return operation.invoke(arrays, options, form=form, platform=platform, cfg=cfg)

    def derived(arrays: Mapping[str, Any], specs: Mapping[str, PartitionSpec]) -> dict[str, Any]:
        split = Split.of(arrays, specs, mesh)
        _check_lengths(split, sequence_axes)
        operation.check_values(arrays)
        return _others(arrays, specs, split)

    traced, static = split_traced(options)
    options = with_traced(traced, dict(static_options(static)))
    return _mesh.over_mesh(
        _Local(operation, form, tuple(options)),
        _with_streams(arrays, static),
        options,
        positional=positional,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        derived=derived,
        following=_FOLLOWING,
        platform=platform,
        cfg=cfg,
    )


@dataclasses.dataclass(frozen=True)
class Split:
    """The mesh axes, of more than one device, over which attention is split."""

    batch: Axes = ()
    queries: Axes = ()
    keys: Axes = ()
    heads: Axes = ()

    @classmethod
    def of(cls, arrays: Mapping[str, Any], specs: Mapping[str, PartitionSpec], mesh: Any) -> Split:
        """Read it off the specs of query and key, `[b, t, h, d]` or `[t, h, d]`."""

        def axes(name: str, axis: int) -> Axes:
            rank, spec = len(arrays[name].shape), specs.get(name, PartitionSpec())
            entry = spec[rank + axis] if 0 <= rank + axis < len(spec) else None
            names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            return tuple(name for name in names if mesh.shape[name] > 1)

        split = cls(axes("query", -4), axes("query", -3), axes("key", -3), axes("query", -2))
        for name in ("key", "value"):
            if axes(name, -4) != split.batch:
                raise invalid("in_specs", f"batch axes {axes(name, -4)} for {name}", f"the query's {split.batch}")
            if axes(name, -2) != split.heads and not (arrays[name].shape[-2] == 1 and not axes(name, -2)):
                raise invalid("in_specs", f"head axes {axes(name, -2)} for {name}", f"the query's {split.heads}")
            if axes(name, -3) != split.keys:
                raise invalid("in_specs", f"length axes {axes(name, -3)} for {name}", f"the key's {split.keys}")
        return split


def _check_lengths(split: Split, sequence_axes: Axes) -> None:
    for name, axes in (("query", split.queries), ("key", split.keys)):
        if axes and not sequence_axes:
            remedy = "split batch and heads, or call ring_attention with axis_name="
            raise invalid("in_specs", f"the {name}'s length split over {axes}", "whole sequences", remedy=remedy)
        if axes != sequence_axes:
            raise invalid("in_specs", f"the {name}'s length split over {axes or 'nothing'}", f"split over {sequence_axes}")


_DIMS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("query_segments", "query_positions"), ("b q",)),
    **dict.fromkeys(("key_segments", "key_positions"), ("b k",)),
    **dict.fromkeys(("query_lengths", "key_lengths"), ("b",)),
    **dict.fromkeys(("key_tiles", "full_tiles"), ("b . .", "b h . .")),
    **dict.fromkeys(("mask", "bias"), (".", "q .", "h q .", "b h q .")),
    "dense": ("b h q s",),
    "dropout_streams": ("b h .",),
    "softmax_aux": ("h", "h ."),
    "batch_index": ("b",),
    "head_index": (". h",),
}
"""Arrays beside query, key and value, and what their axes are, at each number of axes: those of batch, heads, queries and keys are
split as query and key are. Of a dense mask each device keeps all keys (s) where keys are split over the axes of the queries."""


def mask_info_specs(mask_info: Any, split: Split) -> Any:
    """PartitionSpecs of a `MaskInfo`'s arrays."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _following(path[-1].name, leaf.shape, split), mask_info)


def _following(name: str, shape: tuple[int, ...], split: Split) -> PartitionSpec:
    """The spec of an array that is split as query and key are; axes of size 1 are whole."""
    own = () if split.keys == split.queries else split.keys
    axes = {"b": split.batch, "h": split.heads, "q": split.queries, "k": split.keys, "s": own}
    of_any = (dims.split() for dims in _DIMS[name])
    dims = next((dims for dims in of_any if len(dims) == len(shape)), ["."] * len(shape))  # others are refused behind
    return PartitionSpec(*(axes.get(dim) or None if size != 1 else None for dim, size in zip(dims, shape, strict=True)))


def _with_streams(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The dropout streams of the whole problem in place of its seed, so that splitting it drops the same entries."""
    changed = {name: value for name, value in arrays.items() if name != "dropout_seed"}
    rate, same = as_dropout_rate(options.get("dropout_prob", 0.0)), bool(options.get("broadcast_dropout"))
    query = arrays["query"]
    batch = query.shape[0] if len(query.shape) == 4 else 1
    streams = streams_of_seed(rate, arrays.get("dropout_seed"), batch, query.shape[-2], same=same)
    return changed if streams is None else {**changed, "dropout_streams": streams}


def _others(arrays: Mapping[str, Any], given: Mapping[str, PartitionSpec], split: Split) -> dict[str, Any]:
    """Specs of the arrays that none was given for and that are split as query and key are."""
    specs: dict[str, Any] = {}
    for name, value in arrays.items():
        if value is not None and name not in given:
            if name == "mask_info":
                specs[name] = mask_info_specs(value, split)
            elif name in _DIMS:
                specs[name] = _following(name, value.shape, split)
    return specs
