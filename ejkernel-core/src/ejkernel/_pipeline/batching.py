"""`vmap` by folding the mapped axis into the batch factor, so that kernels never see an extra axis."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel._dispatch.execution import run_backward, run_forward
from ejkernel.call.arrays import named, parse_dims
from ejkernel.call.request import Request


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
        gradients = fold.out_of(batched_backward(request.reshaped(folded[0]), *folded))
        return gradients, jax.tree.map(lambda _: True, gradients)

    return backward(inputs, outputs, cotangents)


class _Fold:
    """The fold of one mapped axis of `axis_size` into the batch factor."""

    def __init__(self, request: Request, inputs: Any, in_batched: Any, axis_size: int) -> None:
        self.axis_size = axis_size
        self.dims = {name: parse_dims(text) for name, text in request.operation.dimensions(request.call).items()}
        flags = dict(named(in_batched))
        self.sizes = {name: array.shape[int(flags[name])] for name, array in named(inputs)}
        self.batch = next(size for name, size in self.sizes.items() if not self.dims[name][0].broadcasts)
        self.batch_major = any(flags[name] and _splits_second_axis(array) for name, array in named(inputs))

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
        if self.batch_major:
            array = jnp.swapaxes(array, 0, 1)
        return array.reshape(self.axis_size * self.batch, *array.shape[2:])

    def out_of(self, values: Any) -> Any:
        """Unfold every array; the gradient of an input that the batch shared is summed over the batch."""
        return type(values)(
            **{
                name: None if array is None else self._unfold(array, self.sizes.get(name, self.batch))
                for name, array in values._asdict().items()
            }
        )

    def _unfold(self, array: Any, size: int) -> Any:
        if self.batch_major:
            array = jnp.swapaxes(array.reshape(self.batch, self.axis_size, *array.shape[1:]), 0, 1)
        else:
            array = array.reshape(self.axis_size, self.batch, *array.shape[1:])
        if size == self.batch:
            return array
        total = jnp.sum(array, axis=1, keepdims=True, dtype=jnp.promote_types(array.dtype, jnp.float32))
        return total.astype(array.dtype)


def _splits_second_axis(array: Any) -> bool:
    """Whether an explicit mesh splits the batch, which then has to be the major part of the folded axis."""
    spec = (*jax.typeof(array).sharding.spec, None, None)
    return spec[0] is None and spec[1] is not None
