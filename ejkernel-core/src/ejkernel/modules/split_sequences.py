"""Recurrences and short convolutions over sequences that are split over devices."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp

from ejkernel import typing as t
from ejkernel._pipeline.arguments import public
from ejkernel._pipeline.operation import run_by
from ejkernel.compositions.axes import as_axes, axis_size
from ejkernel.compositions.sequence.carry import Shards
from ejkernel.compositions.sequence.entry import run
from ejkernel.errors import invalid
from ejkernel.modules.constant_decays import lightning_attention, retention
from ejkernel.modules.convolutions import causal_conv1d
from ejkernel.modules.delta_products import gated_delta_product
from ejkernel.modules.deltas import gated_delta_rule, kernel_delta_attention, rwkv7, rwkv7_mul
from ejkernel.modules.recurrences import gla_attention, recurrent_attention, rwkv6
from ejkernel.modules.states import state_space_v1, state_space_v2
from ejkernel.operations.common.packed import check_bounds, check_packed, check_segments
from ejkernel.utils.integers import as_int32

__all__ = ["sequence_parallel"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    causal_conv1d,
    gated_delta_product,
    gated_delta_rule,
    gla_attention,
    kernel_delta_attention,
    lightning_attention,
    recurrent_attention,
    retention,
    rwkv6,
    rwkv7,
    rwkv7_mul,
    state_space_v1,
    state_space_v2,
)


@public(dispatches=False)
def sequence_parallel(function: Callable[_Arguments, _Result], axis_name: t.AxisNames) -> Callable[_Arguments, _Result]:
    """A recurrence, or the convolution in front of it, over a sequence that is split over devices; inside `jax.shard_map`.

    States pass between devices first; then every device runs its own tokens from the state that enters. Gradients of states pass
    back. What is exchanged does not grow with the sequence. Results and gradients are those of one device.

    Args:
        function: one of `causal_conv1d`, `gated_delta_product`, `gated_delta_rule`, `gla_attention`, `kernel_delta_attention`,
            `lightning_attention`, `recurrent_attention`, `retention`, `rwkv6`, `rwkv7`, `rwkv7_mul`, `state_space_v1` and
            `state_space_v2`.
        axis_name: mesh axis, or axes, of the surrounding `jax.shard_map`, over which T is split, evenly and in natural order.

    Returns:
        A function with the same arguments, in which arrays with an axis T hold the device's tokens; seg_ids too. `initial_state`
        is that of the whole sequence, the same on every device, and so is the state that is returned. cu_seqlens are those of
        the whole sequence. `mesh`, `in_specs` and `out_specs` are refused.

    Raises:
        ValueError: function is another, there is no such axis, or a device has no tokens or fewer than a filter looks back.
        TypeError: a wrong type.

    Source: Sun et al., LASP-2: Rethinking Sequence Parallelism for Linear Attention and Its Hybrid, 2025.
    """
    axes = as_axes(axis_name)
    if not axes:
        raise invalid("axis_name", axis_name, "a mesh axis")
    if function not in _FUNCTIONS:
        known = ", ".join(one.__name__ for one in _FUNCTIONS)
        raise invalid("function", getattr(function, "__name__", repr(function)), f"one of {known}")
    parameters = inspect.signature(function).parameters
    positional = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]

    @functools.wraps(function)
    def split(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        size = axis_size(axes)
        if len(arguments) > len(positional):
            raise TypeError(f"{function.__name__} takes {len(positional)} arguments by position here; name the others")
        for name in ("mesh", "in_specs", "out_specs"):
            if options.get(name) is not None:
                raise invalid(name, "a value", "None inside a shard_map", remedy="split the arrays by that of the caller")
        first = arguments[0] if arguments else options.get(positional[0])
        shape = getattr(first, "shape", ())
        if len(shape) < 2:  # which the function refuses
            return function(*arguments, **options)
        shards, local = _shards(axes, size, positional[0], first, options)
        with run_by(functools.partial(run, shards)):
            return cast("Callable[..., _Result]", function)(*arguments, **local)

    return split


def _shards(axes: tuple[str, ...], size: int, name: str, first: Any, options: Any) -> tuple[Shards, Any]:
    """How the sequence is split, and the options as this device sees them."""
    batch, length = first.shape[:2]
    if length == 0 and size > 1:
        raise invalid(name, "no tokens on a device", "at least one")
    seg_ids, bounds = options.get("seg_ids"), options.get("cu_seqlens")
    if seg_ids is not None:
        check_segments(seg_ids, batch, length)
    if bounds is None:
        return Shards(axes, size, length, None if seg_ids is None else as_int32(seg_ids)), options
    if seg_ids is not None:
        raise invalid("seg_ids", "an array", "None beside cu_seqlens", remedy="say with one of them where sequences end")
    check_packed(bounds, name, batch)
    check_bounds(bounds, f"{name} on {size} devices", jax.ShapeDtypeStruct((batch, size * length), jnp.float32))
    shards = Shards(axes, size, length, bounds=as_int32(bounds))
    return shards, {**options, "cu_seqlens": shards.local_bounds}
