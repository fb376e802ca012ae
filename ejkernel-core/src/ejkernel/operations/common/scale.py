"""The factor of a recurrence's output, which the running program may compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ejkernel.utils.checks import finite_number
from ejkernel.utils.dtypes import accumulator, multiplied
from ejkernel.utils.tracing import is_traced, traced_number


def output_scale(value: Any, width: int, dtype: Any) -> tuple[float, Callable[[Any], Any]]:
    """The static factor, and what becomes of the output `[..., V]`: it takes what a traced factor differs from `1 / sqrt(D)`.

    The query cannot take it, as it may be normalised. The output is multiplied in float32 and rounded to its dtype again.
    """
    default = max(width, 1) ** -0.5
    if not is_traced(value):
        return default if value is None else finite_number("scale", value), lambda out: out
    factor = traced_number("scale", value, accumulator(dtype)) / default
    return default, lambda out: multiplied(out, factor)
