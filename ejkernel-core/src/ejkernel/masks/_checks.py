"""Checks of what a mask is built from: ranks, dtypes, sizes that must agree, and the static structure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ejkernel.errors import invalid, wrong_type
from ejkernel.utils import checks
from ejkernel.utils.tracing import STATIC_REMEDY

Window = tuple[int | None, int | None]


def is_concrete(array: Any) -> bool:
    """Whether the values can be read now, that is, outside any tracing of them."""
    return isinstance(array, (np.ndarray, jax.Array)) and not isinstance(array, jax.core.Tracer)


def is_here(array: Any) -> bool:
    """Whether this host can read all values now: those of several hosts it cannot."""
    return is_concrete(array) and getattr(array, "is_fully_addressable", True)


def as_array(name: str, value: Any) -> Any:
    """Lists and NumPy arrays become NumPy arrays; JAX arrays, tracers and shape structs stay what they are."""
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        return value
    if isinstance(value, (np.ndarray, np.generic, list, tuple, int)):
        return np.asarray(value)
    raise wrong_type(name, type(value).__name__, "an array")


def _cast(array: Any, dtype: Any) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape, dtype)
    if isinstance(array, np.ndarray):
        with jax.ensure_compile_time_eval():  # under tracing too, what was given as values stays values
            return jnp.asarray(array, dtype)
    return array.astype(dtype)


def integers(name: str, value: Any, axes: str, *, remedy: str = "") -> Any:
    """An int32 array with one axis per word of `axes`, e.g. `"batch query"`; None stays None."""
    if value is None:
        return None
    array = as_array(name, value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise wrong_type(name, f"dtype {array.dtype}", "an integer type", remedy=remedy)
    words = axes.split()
    if len(array.shape) != len(words):
        raise invalid(name, f"shape {tuple(array.shape)}", f"[{', '.join(words)}]")
    # ids of other types could wrap to padding; what is traced or of several hosts cannot be looked at
    known = is_here(array)
    wide = jnp.iinfo(array.dtype).max >= 2**31
    if wide and not known and jnp.issubdtype(array.dtype, jnp.unsignedinteger):
        raise wrong_type(name, f"traced values of dtype {array.dtype}", "int32, which holds them", remedy="convert them before")
    if wide and known and array.size and not -(2**31) <= int(array.min()) <= int(array.max()) < 2**31:
        raise invalid(name, f"values in [{array.min()}, {array.max()}]", "values that int32 can hold")
    return array if array.dtype == jnp.int32 and not isinstance(array, np.ndarray) else _cast(array, jnp.int32)


def boolean(name: str, value: Any) -> Any:
    """A bool array from booleans, or from integers that are 0 (hidden) or 1 (visible). Floats are refused, not thresholded."""
    array = as_array(name, value)
    if jnp.issubdtype(array.dtype, jnp.bool_):
        return _cast(array, jnp.bool_) if isinstance(array, np.ndarray) else array
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise wrong_type(
            name,
            f"dtype {array.dtype}",
            "bool, or integers 0 and 1",
            remedy="pass `mask > 0` for a 0/1 mask, or give additive values as the attention's `bias`",
        )
    if is_concrete(array):
        host = np.asarray(array)
        if host.size and not 0 <= host.min() <= host.max() <= 1:
            raise invalid(
                name,
                f"integers in [{host.min()}, {host.max()}]",
                "0 and 1",
                remedy="use MaskInfo.from_segments for segment ids",
            )
    return _cast(array, jnp.bool_)


def dense(value: Any) -> Any:
    """`[batch, head, query, key]`, any of them 1."""
    if value is None:
        return None
    array = boolean("dense", value)
    if len(array.shape) != 4:
        raise invalid(
            "dense", f"shape {tuple(array.shape)}", "[batch, head, query, key]", remedy="MaskInfo.from_attention_mask adds axes"
        )
    return array


def window(value: Any) -> Window | None:
    """`(left, right)`, both counted inclusively, None for unlimited. An int w means (w, w)."""
    if value is None:
        return None
    sides = value if isinstance(value, (tuple, list)) else (value, value)
    if len(sides) != 2:
        raise invalid("window", value, "an int or (left, right)")
    left, right = (None if side is None else integer("window", side, 0) for side in sides)
    return None if left is None and right is None else (left, right)


def integer(name: str, value: Any, least: int | None = None) -> int:
    """A Python int, refused if it is a bool, an array or below `least`."""
    function = {"window": "apply_sliding_window", "chunk_size": "apply_chunked"}.get(name)
    remedy = f"MaskInfo.{function} takes traced values" if function else STATIC_REMEDY
    return checks.integer(name, value, least, remedy=remedy)


def agree(what: str, sizes: Sequence[tuple[str, int | None, bool]]) -> None:
    """Refuse different sizes of one dimension; the third entry says whether a size of 1 broadcasts."""
    known = [(name, size) for name, size, broadcasts in sizes if size is not None and not (broadcasts and size == 1)]
    if len({size for _, size in known}) > 1:
        raise invalid(", ".join(name for name, _ in known), " and ".join(str(size) for _, size in known), f"one {what}")


def cumulative(name: str, value: Any) -> Any:
    """Standard cumulative lengths `[n + 1]`: starting at 0, never falling (checked where the values are known)."""
    array = integers(name, value, "sequences+1")
    if array is None or array.shape[0] < 1:
        raise invalid(name, value, "at least one value, [0, l1, l1 + l2, ...]")
    if is_concrete(array):
        host = np.asarray(array)
        if host[0] != 0:
            raise invalid(
                name, f"first value {host[0]}", "0", remedy="pass cumulative lengths [0, l1, l1 + l2, ...], not lengths"
            )
        if (np.diff(host) < 0).any():
            raise invalid(name, host.tolist(), "values that never fall", remedy="pass cumulative lengths, not lengths")
    return array


def static_total(name: str, cu_seqlens: Any, total_length: int | None) -> int:
    """The length of the packed axis: as given, or the last cumulative length where that is known."""
    if total_length is None:
        if not is_concrete(cu_seqlens):
            raise invalid(f"total_length for a traced {name}", None, "a static int", remedy="pass total_length=x.shape[axis]")
        return int(np.asarray(cu_seqlens)[-1])
    total = integer("total_length", total_length, 0)
    if is_concrete(cu_seqlens) and int(np.asarray(cu_seqlens)[-1]) > total:
        raise invalid("total_length", total, f"at least the last cumulative length, {int(np.asarray(cu_seqlens)[-1])}")
    return total
