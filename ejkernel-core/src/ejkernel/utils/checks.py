"""Argument checks that several operations share. Each raises `ValueError`/`TypeError` naming argument, got and expected."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.errors import invalid, wrong_type
from ejkernel.utils.tracing import STATIC_REMEDY, refuse_traced


def check_array(name: str, value: Any, *, ndim: int | None = None, floating: bool = True) -> None:
    """Refuse what is not an array, of another rank, or not of a floating type."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise wrong_type(name, type(value).__name__, "an array")
    if ndim is not None and len(value.shape) != ndim:
        raise invalid(name, f"shape {tuple(value.shape)} with {len(value.shape)} axes", f"{ndim} axes")
    if floating and not jnp.issubdtype(value.dtype, jnp.floating):
        raise wrong_type(name, f"dtype {value.dtype}", "a floating type")


def check_given(**arguments: Any) -> None:
    """Refuse None for what a function must be given, where the operation below would take it for absent."""
    for name, value in arguments.items():
        if value is None:
            raise wrong_type(name, "None", "an array")


def check_shape(name: str, value: Any, expected: tuple[int, ...], meaning: str) -> None:
    """Refuse an array of another shape; `meaning` says what the axes are, e.g. `"[channels]"`."""
    check_array(name, value, floating=False)
    if tuple(value.shape) != expected:
        raise invalid(name, f"shape {tuple(value.shape)}", f"{expected} = {meaning}")


def normalise_axis(axis: int, ndim: int) -> int:
    """A non-negative axis of an array of rank `ndim`."""
    refuse_traced("axis", axis)
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise wrong_type("axis", repr(axis), "an int")
    if not -ndim <= axis < ndim:
        raise invalid("axis", axis, f"a value in [{-ndim}, {ndim - 1}]")
    return axis % ndim


def normalise_axes(name: str, axis: int | tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """Non-negative axes, rising, of an array `name` of rank `ndim`."""
    if ndim == 0:
        raise invalid(name, "shape ()", "at least one axis")
    axes = tuple(sorted(normalise_axis(one, ndim) for one in (axis if isinstance(axis, tuple) else (axis,))))
    if not axes or len(set(axes)) != len(axes):
        raise invalid("axis", axis, "one or more axes, each once")
    return axes


def check_compute(name: str, value: Any, *, ndim: int | None = None) -> None:
    """Refuse what is not an array of a floating type of at least 16 bits."""
    check_array(name, value, ndim=ndim)
    if jnp.dtype(value.dtype).itemsize < 2:
        raise wrong_type(name, f"dtype {value.dtype}", "float32, bfloat16 or float16", remedy="convert it and apply its scale")


def result_dtype(name: str, given: Any) -> str:
    """The name of a floating dtype of at least 16 bits."""
    try:
        dtype = jnp.dtype(given)
    except TypeError:
        raise wrong_type(name, repr(given), "float32, bfloat16 or float16") from None
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise wrong_type(name, f"dtype {dtype}", "float32, bfloat16 or float16")
    return dtype.name


def integer(name: str, value: Any, least: int | None = None, *, remedy: str = STATIC_REMEDY) -> int:
    """A Python int, refused if it is a bool, an array (`remedy` is for a traced one) or below `least`."""
    refuse_traced(name, value, "an int known when the program is built", remedy=remedy)
    if isinstance(value, bool) or not hasattr(value, "__index__") or isinstance(value, jax.Array):
        raise wrong_type(name, repr(value), "an int")
    number = operator.index(value)
    if least is not None and number < least:
        raise invalid(name, number, f"at least {least}")
    return number


def finite_number(name: str, value: Any, *, at_least: float | None = None) -> float:
    """A Python float that is finite and not below `at_least`."""
    refuse_traced(name, value, "a number known when the program is built")
    if isinstance(value, bool) or not hasattr(value, "__float__") or getattr(value, "shape", ()) != ():
        raise wrong_type(name, repr(value), "a number")
    number = float(value)
    if not math.isfinite(number):
        raise invalid(name, number, "a finite number")
    if at_least is not None and number < at_least:
        raise invalid(name, number, f"a value >= {at_least:g}")
    return number
