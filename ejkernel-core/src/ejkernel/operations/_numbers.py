"""Checks and dtype rules for operations that compute in the inputs' own floating type."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from ejkernel.errors import invalid, wrong_type
from ejkernel.operations._checks import check_array


def check_compute(name: str, value: Any, *, ndim: int | None = None) -> None:
    """Refuse what is not an array of a floating type of at least 16 bits."""
    check_array(name, value, ndim=ndim)
    if jnp.dtype(value.dtype).itemsize < 2:
        raise wrong_type(name, f"dtype {value.dtype}", "float32, bfloat16 or float16", remedy="convert it and apply its scale")


def finite_number(name: str, value: Any, *, at_least: float | None = None) -> float:
    """A Python float that is finite and not below `at_least`."""
    if isinstance(value, bool) or not hasattr(value, "__float__") or getattr(value, "shape", ()) != ():
        raise wrong_type(name, repr(value), "a number")
    number = float(value)
    if not math.isfinite(number):
        raise invalid(name, number, "a finite number")
    if at_least is not None and number < at_least:
        raise invalid(name, number, f"a value >= {at_least:g}")
    return number


def statistics_dtype(dtype: str) -> str:
    """The dtype of saved statistics of rows of this dtype: float32, or float64 for float64."""
    return "float64" if dtype == "float64" else "float32"
