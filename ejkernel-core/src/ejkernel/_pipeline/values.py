"""Values that no public function takes: refused by the argument's public name, before anything else looks at them."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Hashable, Mapping, Set
from typing import Any, cast

import jax
import numpy as np
from jaxtyping import AbstractArray

from ejkernel.errors import invalid, wrong_type

_LEAST, _MOST = -(2**63), 2**64 - 1
_NUMBERS = (bool, int, float, complex, np.generic)


def check_values(function: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Refuse arrays that are none of JAX or NumPy, anything else where only arrays go, NaN, and integers of more than 64 bits.

    Arrays of JAX are not read, as they would have to be waited for, nor are the elements of NumPy's.

    Raises:
        ValueError: NaN, or an integer that no dtype holds.
        TypeError: no array, or one whose elements are not numbers.
    """
    places = _places(function)
    for (name, kind), value in zip(places.items(), args, strict=False):
        if value is not None and not (kind is _ARRAY and _is_jax(value)):
            _check(name, kind, value)
    for name, value in options.items():
        if value is not None and type(value) is not bool:
            kind = places.get(name)
            if not (kind is _ARRAY and _is_jax(value)):
                _check(name, kind, value)


_jax_types: set[type] = set()
"""Types of arrays and tracers that were met: `isinstance` of `jax.Array` takes ten times as long as a look into a set."""


def _is_jax(value: Any) -> bool:
    kind = cast("type[Any]", type(value))
    if kind in _jax_types:
        return True
    if isinstance(value, jax.Array):
        _jax_types.add(kind)
        return True
    return False


_ARRAY = "array"
_MAPPINGS = ("cfg", "mod_inputs")
"""Arguments that may be mappings."""
_Kind = str | tuple[Any, ...] | None


@functools.cache
def _places(function: Callable[..., Any]) -> Mapping[str, _Kind]:
    """The parameters in order: whether each may be an array alone, which words it takes if these alone, or None."""
    hints = typing.get_type_hints(function)
    return {name: _kind(hints.get(name)) for name in inspect.signature(function).parameters}


def _kind(hint: Any) -> _Kind:
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
    if len(kinds) == 1 and kinds[0] is not hint:
        return _kind(kinds[0])
    return _ARRAY if kinds and all(isinstance(kind, type) and issubclass(kind, AbstractArray) for kind in kinds) else None


def _check(name: str, kind: _Kind, value: Any) -> None:
    if isinstance(kind, tuple) and not isinstance(value, Hashable):
        got = repr(value) if isinstance(value, list) else type(value).__name__
        raise wrong_type(name, got, f"one of {', '.join(map(str, kind))}")
    if kind is _ARRAY and not isinstance(value, _NUMBERS):
        refuse_foreign(name, value)
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise wrong_type(name, type(value).__name__, "an array")
    if isinstance(value, (Mapping, Set)) and name not in _MAPPINGS:
        raise wrong_type(name, type(cast("Any", value)).__name__, "a number, an array or None")
    if not isinstance(value, str):
        _check_part(name, value)


def _check_part(name: str, value: Any) -> None:
    """A value, or a part of one such as a side of a window."""
    if isinstance(value, (tuple, list)):
        for part in cast("tuple[Any, ...]", value):
            _check_part(name, part)
    elif isinstance(value, int):
        if not _LEAST <= value <= _MOST:
            raise invalid(name, f"an integer of {value.bit_length()} bits", "one of at most 64 bits")
    elif isinstance(value, (float, np.floating)):
        if value != value:
            raise invalid(name, "nan", "a number")
    elif not _is_jax(value):
        refuse_foreign(name, value)
        if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind == "f" and np.isnan(value):
            raise invalid(name, "nan", "a number")


def symbolic_size(
    function: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any], said: str
) -> ValueError | None:
    """The refusal of the first symbolic size of `jax.export` in the arguments, one that JAX's error names if it names any."""
    from jax import export

    given = {**dict(zip(_places(function), args, strict=False)), **options}
    found = [
        (name, axis, size)
        for name in _places(function)
        for leaf in jax.tree.leaves(given.get(name))
        for axis, size in enumerate(getattr(leaf, "shape", ()))
        if export.is_symbolic_dim(size)
    ]
    words = {*re.findall(r"\w+", said)}
    named = [one for one in found if {*re.findall(r"\w+", str(one[2]))} & words] or found
    if not named:
        return None
    name, axis, size = named[0]
    remedy = (
        "export one program for each size, or leave sizes symbolic over which nothing is split into blocks, such as the batch"
    )
    return invalid(name, f"a symbolic size, {size}, of axis {axis}", "a number", remedy=remedy)


def refuse_foreign(name: str, value: Any) -> None:
    """Refuse an array that JAX does not take, such as another framework's tensor or one of Python objects.

    Raises:
        TypeError: naming what to convert it by.
    """
    if not hasattr(value, "shape") or not hasattr(value, "dtype") or isinstance(value, (type, jax.ShapeDtypeStruct)):
        return
    if isinstance(value, np.ndarray):
        if not _is_number(value.dtype):
            raise wrong_type(name, f"an array of dtype {value.dtype}", "an array of numbers")
        return
    if hasattr(value, "__jax_array__") or not jax.tree_util.all_leaves([value]):
        return
    try:
        jax.typeof(value)
    except TypeError as error:
        kind = cast("type[Any]", type(value))
        exchanged = "jax.dlpack.from_dlpack" if hasattr(value, "__dlpack__") else "numpy.asarray"
        remedy = f"convert it, for example by {exchanged}"
        got = f"{kind.__module__}.{kind.__qualname__}"
        raise wrong_type(name, got, "an array of JAX or NumPy", remedy=remedy) from error


@functools.cache
def _is_number(dtype: np.dtype[Any]) -> bool:
    """Whether JAX has arrays of a dtype of NumPy."""
    try:
        jax.typeof(np.zeros((), dtype))
    except TypeError:
        return False
    return True
