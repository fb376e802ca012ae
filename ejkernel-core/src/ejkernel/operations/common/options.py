"""Options of public functions, checked and in their normal form."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import numpy as np

from ejkernel.errors import invalid, wrong_type
from ejkernel.utils.tracing import refuse_traced

_PRECISIONS = ("default", "high", "highest")


def as_number(name: str, value: Any) -> float:
    """A Python float of a number that is known when the program is built."""
    refuse_traced(name, value, "a number known when the program is built")
    if isinstance(value, (bool, str)) or value is None or getattr(value, "shape", ()) != ():
        raise wrong_type(name, repr(value), "a number")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise wrong_type(name, repr(value), "a number") from None
    if not math.isfinite(number):
        raise invalid(name, number, "a finite number")
    return number


def as_soft_cap(value: Any, name: str = "logits_soft_cap") -> float | None:
    """A cap > 0 or None."""
    if value is None:
        return None
    cap = as_number(name, value)
    if cap <= 0:
        raise invalid(name, cap, "a value > 0, or None for no cap")
    return cap


def as_count(name: str, value: Any, least: int) -> int:
    """An int of at least `least`."""
    refuse_traced(name, value, "an int known when the program is built")
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        count = operator.index(value)
    except TypeError:
        raise wrong_type(name, repr(value), "an int known when the program is built") from None
    if count < least:
        raise invalid(name, count, f"a value >= {least}")
    return count


def as_flag(name: str, value: Any) -> bool:
    """True or False."""
    refuse_traced(name, value, "True or False, known when the program is built")
    if not isinstance(value, (bool, np.bool_)):
        raise wrong_type(name, repr(value), "True or False")
    return bool(value)


def as_precision(value: Any) -> str | None:
    """None, `"default"`, `"high"` or `"highest"`, from those or a `jax.lax.Precision`."""
    if value is None:
        return None
    name = value.name if isinstance(value, jax.lax.Precision) else value
    if not isinstance(name, str):
        raise wrong_type("precision", repr(value), "None, a jax.lax.Precision or its name")
    if name.lower() not in _PRECISIONS:
        raise invalid("precision", repr(value), f"None or one of {', '.join(_PRECISIONS)}")
    return name.lower()
