"""The factors of attention's logits and of a recurrence's output, which the running program may compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ejkernel.operations.common.options import as_number
from ejkernel.utils.checks import finite_number
from ejkernel.utils.dtypes import accumulator, multiplied
from ejkernel.utils.tracing import is_traced, traced_number


def output_scale(value: Any, width: int, dtype: Any) -> tuple[float, Callable[[Any], Any]]:
    """The static factor, and what becomes of the output `[..., V]`: it takes what a traced factor differs from `1 / sqrt(D)`.

    The query cannot take it, as it may be normalised. The output is multiplied in float32 and rounded to its dtype again.
    """
    default = max(width, 1) ** -0.5
    if not is_traced(value):
        return default if value is None else finite_number("softmax_scale", value), lambda out: out
    factor = traced_number("softmax_scale", value, accumulator(dtype)) / default
    return default, lambda out: multiplied(out, factor)


def as_scale(value: Any, head_size: int) -> float:
    """The factor on `query . key`; None means `1 / sqrt(D)`."""
    return 1 / math.sqrt(head_size) if value is None else as_number("softmax_scale", value)


def scaled(query: Any, value: Any, head_size: int, name: str = "softmax_scale") -> tuple[Any, float]:
    """The query and the static factor on `query . key`. Of a traced factor, the query takes what differs from `1 / sqrt(D)`.

    It is multiplied in float32 and rounded to its dtype again. What is not finite stays as it is and has no part in the factor's
    gradient, so that padding may hold NaN.
    """
    if not is_traced(value):
        return query, as_scale(value, head_size)
    default = as_scale(None, head_size)
    wide = accumulator(query.dtype)
    return multiplied(query, traced_number(name, value, wide) / default), default
