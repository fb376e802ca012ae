"""What the losses over a vocabulary share: which tokens count, reductions, and the axes of a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from ejkernel._plugins.registry import kernel_registry
from ejkernel.call.arrays import statistics_dtype
from ejkernel.call.policy import policy_for_call
from ejkernel.compositions import mesh as _mesh
from ejkernel.compositions.axes import Axes, check_mesh_axes
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.flash_attention.interface import is_concrete
from ejkernel.utils.checks import finite_number
from ejkernel.utils.tracing import is_traced, traced_number, without_gradient

REDUCTIONS = ("none", "mean", "sum")


def check_reduction(reduction: Any) -> None:
    """Refuse an unknown reduction."""
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise invalid("reduction", repr(reduction), f"one of {', '.join(REDUCTIONS)}")


def counted(rows: tuple[int, ...], weights: Any, attention_mask: Any, dtype: Any) -> tuple[Any, Any]:
    """Which tokens count, bool, and how much, in the losses' dtype; both of the rows' shape. A token of weight 0 does not."""
    kept = jnp.ones(rows, bool)
    for name, array in (("weights", weights), ("attention_mask", attention_mask)):
        if array is None:
            continue
        if not hasattr(array, "dtype"):
            raise wrong_type(name, type(array).__name__, "an array")
        if tuple(array.shape) != rows:
            raise invalid(name, f"shape {tuple(array.shape)}", f"{rows}, one for each token")
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            raise wrong_type(name, f"dtype {array.dtype}", "real numbers or bool")
        kept = kept & array.astype(bool)
    if weights is None:
        return kept, kept.astype(dtype)
    return kept, jnp.where(kept, jax.lax.stop_gradient(weights).astype(dtype), 0)


def as_temperature(value: Any, dtype: Any) -> Any:
    """A temperature > 0 of logits of this dtype. A traced one has no gradient, and nobody can check its value."""
    if is_traced(value):
        return without_gradient("temperature", traced_number("temperature", value, statistics_dtype(jnp.dtype(dtype).name)))
    number = finite_number("temperature", value)
    if number <= 0:
        raise invalid("temperature", number, "a value > 0")
    return number


def forms_gradients_early(x: Any, platform: Any) -> bool:
    """Whether a reduced loss of hidden states is asked of `linear_cross_entropy`, whose forward forms the gradients.

    Not where XLA may split the rows, since each of its steps over rows would then sum the head's gradient over devices: on Auto
    axes, or where a program of several devices says nothing of a mesh. Not in float16, where a loss is scaled so that gradients
    do not vanish, and the scale comes after them. And not on a platform that has no such kernel.
    """
    if x.dtype == jnp.float16:
        return False
    platforms = policy_for_call("linear_cross_entropy", platform).platforms
    if platforms and not {*platforms} & {*kernel_registry.list_platforms("linear_cross_entropy")}:
        return False
    mesh = jax.typeof(x).sharding.mesh
    if not mesh.empty:
        return not any(mesh.shape[axis] > 1 for axis in mesh.auto_axes)
    if is_concrete(x):
        return not isinstance(x, jax.Array) or len(x.devices()) == 1
    return jax.device_count() == 1


def summed(x: Any, axes: Axes) -> Any:
    """The sum of an array over this device's tokens and those of other devices along the axes."""
    total = jnp.sum(x)
    return jax.lax.psum(total, axes) if axes else total


def reduced(x: Any, weight_sum: Any, reduction: str, axes: Axes) -> Any:
    """Weighted losses of tokens, reduced; a mean over no token is 0."""
    if reduction == "none":
        return x
    total = summed(x, axes)
    return total if reduction == "sum" else total / jnp.where(weight_sum == 0, 1, weight_sum)


def split_axes(spec: Any, rank: int) -> tuple[Axes, Axes]:
    """The mesh axes over which a spec splits all axes but the last, and the last; also those of one device."""
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec or ()]
    entries += [()] * (rank - len(entries))
    return tuple(axis for entry in entries[:-1] for axis in entry), entries[-1]


def several(axes: Axes, mesh: Any) -> Axes:
    """Those of the axes that have more than one device."""
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def mesh_axes(axes: Axes, arrays: dict[str, Any], specs: dict[str, Any], mesh: Any, transpose_head: bool) -> tuple[Axes, Axes]:
    """The axes over which the vocabulary, and over which the tokens, are split: those that have several devices.

    Along others nothing varies (`mesh.shard` leaves them out of in_specs), and JAX refuses sums over axes of both kinds.
    """
    check_mesh_axes(axes, mesh)
    x = "logits" if arrays["hidden"] is None else "hidden"
    row_axes, last = split_axes(specs.get(x), len(arrays[x].shape))
    if x == "hidden":
        if several(last, mesh):
            raise invalid("in_specs", f"hidden channels split over {last}", "whole hidden states")
        first, second = split_axes(specs.get("lm_head_weight"), 2)
        last, inner = (first, second) if transpose_head else (second, first)
        if several(inner, mesh):
            raise invalid("in_specs", f"the head's hidden channels split over {inner}", "the head split over its vocabulary")
    by_entry = [
        name for name in ("targets", "class_weights") if jnp.issubdtype(getattr(arrays[name], "dtype", int), jnp.floating)
    ]
    for name in by_entry:
        parts = split_axes(specs.get(name), len(arrays[name].shape))[1]
        if several(parts, mesh) != several(last, mesh):
            raise invalid(
                "in_specs", f"entries of {name} split over {parts or 'nothing'}", f"over {last or 'nothing'} as the vocabulary"
            )
    if several(axes, mesh) and several(axes, mesh) != several(last, mesh):
        raise invalid("in_specs", f"the vocabulary split over {last or 'nothing'}", f"over {axes} = vocab_parallel_axis")
    return several(last, mesh), several(row_axes, mesh)


def specs_of(
    arrays: Mapping[str, Any], positional: tuple[str, ...], mesh: Any, in_specs: Any, out_specs: Any
) -> dict[str, Any]:
    """The specs of the present arrays; none without a mesh."""
    if not _mesh.is_sharded(mesh, in_specs, out_specs):
        return {}
    return dict(_mesh.named_specs(arrays, positional, in_specs))


def per_result(out_specs: Any, results: int) -> tuple[Any, ...]:
    """One spec stands for all results but the last, the sum of the weights, which is whole."""
    if isinstance(out_specs, jax.sharding.PartitionSpec) or not isinstance(out_specs, (tuple, list)):
        return (*[out_specs] * (results - 1), jax.sharding.PartitionSpec())
    return tuple(cast("tuple[Any, ...]", out_specs))


def over_vocabulary(loss: Any, lse: Any, total: Any, here: Any, axes: Axes) -> tuple[Any, Any, Any]:
    """A cross entropy's loss, lse and sum of logits over the whole vocabulary, from those of each device's part of it."""
    largest = jax.lax.pmax(jax.lax.stop_gradient(lse), axes)
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    whole = largest + jnp.log(jax.lax.psum(jnp.exp(lse - largest), axes))
    target = jax.lax.psum(jnp.where(here, lse - loss, 0), axes)
    return whole - target, whole, None if total is None else jax.lax.psum(total, axes)


class Entries(NamedTuple):
    """What logits are made of on this device: x `[..., V]`, or `[..., D]` with head `[D, V]` (or `[V, D]`) and bias `[V]`."""

    x: Any
    head: Any
    bias: Any
    transpose_head: bool
    soft_cap: float | None
    precision: Any

    def loss_under(self, q: Any, lse: Any, kept: Any, axes: Axes) -> Any:
        """`sum_v q_v (lse - l_v)` for q `[V]` or `[..., V]`, over the whole vocabulary."""
        mass, mean = self._mean_under(q, kept)
        if axes:
            mass, mean = jax.lax.psum(mass, axes), jax.lax.psum(mean, axes)
        return mass * lse - mean

    def _mean_under(self, q: Any, kept: Any) -> tuple[Any, Any]:
        """`sum_v q_v` and `sum_v q_v l_v` in float32, for q `[V]` or `[..., V]`; 0 for rows that are not kept; of this device.

        With a head `sum_v q_v l_v = x . (head q) + bias . q`: the logits are not formed.
        """
        wide = statistics_dtype(str(self.x.dtype))
        q = q.astype(wide)
        if q.ndim > 1:
            q = jnp.where(kept[..., None], q, jnp.zeros_like(q))
        x = jnp.where(kept[..., None], self.x, jnp.zeros_like(self.x)).astype(wide)
        if self.head is None:
            logits = x
            if self.soft_cap is not None:
                logits = jnp.where(x == -jnp.inf, x, self.soft_cap * jnp.tanh(x / self.soft_cap))
            chosen = q if q.ndim > 1 else jnp.broadcast_to(q, logits.shape)
            found = jnp.sum(jnp.where(chosen == 0, 0, chosen * jnp.where(chosen == 0, 0, logits)), axis=-1)
        else:
            head, products = self.head.astype(wide), self.precision or "highest"
            columns = jnp.matmul(q, head if self.transpose_head else head.T, precision=products)
            found = jnp.sum(x * (columns if q.ndim > 1 else jnp.broadcast_to(columns, x.shape)), axis=-1)
            if self.bias is not None:
                found = found + jnp.matmul(q, self.bias.astype(wide), precision=products)
        return jnp.sum(q, axis=-1), jnp.where(kept, found, 0)
