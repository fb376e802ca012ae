"""`vmap` by folding the mapped axis into the batch factor, so that kernels never see an extra axis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel._dispatch.execution import run_backward, run_forward
from ejkernel.call.arrays import named, parse_dims
from ejkernel.call.partition import Axes, entries_of, explicit_mesh_of, map_shards, placed_on, shards
from ejkernel.call.request import Request
from ejkernel.utils.dtypes import accumulator


def batched_forward(request: Request, inputs: Any) -> Any:
    """Run the forward phase; under `vmap`, run it once on a larger batch."""

    @jax.custom_batching.custom_vmap
    def forward(inputs: Any) -> Any:
        return run_forward(request, inputs)

    @forward.def_vmap
    def _(axis_size: int, in_batched: list[Any], inputs: Any) -> Any:
        fold = _Fold(request, inputs, in_batched[0], axis_size)
        folded = fold.into(inputs, in_batched[0], expand=False)
        outputs = fold.out_of(batched_forward(request.reshaped(folded), folded))
        return outputs, jax.tree.map(lambda _: True, outputs)

    return forward(inputs)


def batched_backward(request: Request, inputs: Any, outputs: Any, cotangents: Any) -> Any:
    """Run the backward phase; under `vmap`, run it once on a larger batch. Returns gradients shaped like the inputs."""

    @jax.custom_batching.custom_vmap
    def backward(inputs: Any, outputs: Any, cotangents: Any) -> Any:
        return run_backward(request, inputs, outputs, cotangents)

    @backward.def_vmap
    def _(axis_size: int, in_batched: list[Any], inputs: Any, outputs: Any, cotangents: Any) -> Any:
        fold = _Fold(request, inputs, in_batched[0], axis_size)
        folded = tuple(
            fold.into(values, flags, expand=True)
            for values, flags in zip((inputs, outputs, cotangents), in_batched, strict=True)
        )
        gradients = fold.placed(fold.out_of(batched_backward(request.reshaped(folded[0]), *folded)), inputs)
        return gradients, jax.tree.map(lambda _: True, gradients)

    return backward(inputs, outputs, cotangents)


class _Fold:
    """The fold of one mapped axis of `axis_size` into the batch factor.

    Where an explicit mesh splits the batch, every shard folds what it holds. Members then stand in another order than without a
    mesh, alike in all arrays, until they are unfolded.
    """

    def __init__(self, request: Request, inputs: Any, in_batched: Any, axis_size: int) -> None:
        self.axis_size = axis_size
        self.dims = {name: parse_dims(text) for name, text in request.operation.dimensions(request.call).items()}
        self.flags = dict(named(in_batched))
        self.sizes = {name: array.shape[int(self.flags[name])] for name, array in named(inputs)}
        self.batch = next(size for name, size in self.sizes.items() if not self.dims[name][0].broadcasts)
        self.mesh = explicit_mesh_of(inputs)
        self.mapped, self.batched = self._split(inputs)

    def _split(self, inputs: Any) -> tuple[Axes, Axes]:
        """The mesh axes that split the mapped axis and the batch."""
        mapped: Axes = ()
        batched: Axes = ()
        if self.mesh is not None:
            specs = {name: entries_of(array) for name, array in named(inputs)}
            flagged = [name for name in specs if self.flags[name]]
            mapped = next((specs[name][0] for name in flagged if specs[name][0]), ())
            splits = (specs[name][int(self.flags[name])] for name in specs if self.sizes[name] == self.batch)
            batched = next((axes for axes in splits if axes and not {*axes} & {*mapped}), ())
        return mapped, batched

    def into(self, values: Any, in_batched: Any, *, expand: bool) -> Any:
        """Fold every array; with `expand`, also those that the whole batch shares, so that each member has its own gradient."""
        flags = dict(named(in_batched))
        return type(values)(
            **{
                name: None if array is None else self._fold(name, array, flags[name], expand)
                for name, array in values._asdict().items()
            }
        )

    def _fold(self, name: str, array: Any, batched: bool, expand: bool) -> Any:
        if not batched:
            if self.dims[name][0].broadcasts and array.shape[0] == 1 and not expand:
                return array
            array = jnp.broadcast_to(array, (self.axis_size, *array.shape))
        if array.shape[1] != self.batch:
            array = jnp.broadcast_to(array, (self.axis_size, self.batch, *array.shape[2:]))
        if self.mesh is None:
            return _folded(array)
        rest = self._rest(array, 2)
        split = (self.mapped, self.batched, *rest)
        return map_shards(_folded, self.mesh, (array,), (split,), ((*self.mapped, *self.batched), *rest))

    def _rest(self, array: Any, start: int) -> list[Axes]:
        """How the other axes of an array are split, as far as the fold leaves mesh axes for them."""
        taken = {*self.mapped, *self.batched}
        return [() if taken & {*axes} else axes for axes in entries_of(array)[start:]]

    def out_of(self, values: Any) -> Any:
        """Unfold every array; the gradient of an input that the batch shared is summed over the batch."""
        return type(values)(
            **{
                name: None if array is None else self._unfold(array, self.sizes.get(name, self.batch))
                for name, array in values._asdict().items()
            }
        )

    def _unfold(self, array: Any, size: int) -> Any:
        if self.mesh is None:
            array = _unfolded(array, self.axis_size, self.batch)
        else:
            members = self.axis_size // shards(self.mapped, self.mesh), self.batch // shards(self.batched, self.mesh)
            rest = self._rest(array, 1)
            array = map_shards(
                lambda shard: _unfolded(shard, *members),
                self.mesh,
                (array,),
                (((*self.mapped, *self.batched), *rest),),
                (self.mapped, self.batched, *rest),
            )
        if size == self.batch:
            return array
        total = jnp.sum(array, axis=1, keepdims=True, dtype=accumulator(array.dtype))
        return total.astype(array.dtype)

    def placed(self, gradients: Any, inputs: Any) -> Any:
        """Gradients split as their inputs are."""
        if self.mesh is None:
            return gradients
        found: dict[str, Any] = {}
        for name, value in named(gradients):
            own = entries_of(getattr(inputs, name))
            found[name] = placed_on(self.mesh, value, own if self.flags[name] else (self.mapped, *own))
        return gradients._replace(**found)


def _folded(array: Any) -> Any:
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _unfolded(array: Any, axis_size: int, batch: int) -> Any:
    return array.reshape(axis_size, batch, *array.shape[1:])
