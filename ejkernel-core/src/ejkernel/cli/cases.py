"""Named cases of operations, as commands are asked for them."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from ejkernel._pipeline.operation import get_operation
from ejkernel._plugins.catalog import operation_module
from ejkernel.call.case import Case
from ejkernel.errors import invalid, suggestion
from ejkernel.testing.problem import DTYPES
from ejkernel.testing.shapes import shapes_of


def cases_of(operation: str) -> dict[str, Case]:
    """The cases of an operation by name.

    Raises:
        ValueError: there is no such operation.
    """
    get_operation(operation)
    return {known.name: known for known in operation_module(operation, "cases").CASES}


def matching_cases(operation: str, patterns: Sequence[str]) -> list[Case]:
    """The cases whose names match any of the patterns.

    Raises:
        ValueError: there is no such operation, or nothing matches one of the patterns.
    """
    cases = cases_of(operation)
    names = {pattern: fnmatch.filter(cases, pattern) for pattern in patterns}
    for pattern, matching in names.items():
        if not matching:
            raise invalid("--case", repr(pattern), f"one of {', '.join(cases)}" + suggestion(pattern, cases))
    return [cases[name] for name in dict.fromkeys(name for matching in names.values() for name in matching)]


def usual_case(operation: str, backend: str) -> Case:
    """The first case of the size that is benchmarked on such a device; the first of all where there is none."""
    cases = [*cases_of(operation).values()]
    tag = "bench-cpu" if backend == "cpu" else "bench"
    return next((case for case in cases if tag in case.tags), cases[0])


def shapes(case: Case, dtype: str) -> Mapping[str, Any]:
    """The arrays of a case as `jax.ShapeDtypeStruct`.

    Raises:
        ValueError: cases are not made in this dtype.
    """
    if dtype not in DTYPES:
        raise invalid("--dtype", repr(dtype), f"one of {', '.join(DTYPES)}" + suggestion(dtype, DTYPES))
    return shapes_of(case, dtype)
