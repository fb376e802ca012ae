"""Which cases a benchmark runs."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence

from ejkernel.call.case import Case
from ejkernel.errors import invalid, suggestion
from ejkernel.operations import OPERATIONS, get_operation, operation_module
from ejkernel_bench._settings import SIZES, Settings


@dataclasses.dataclass(frozen=True)
class Selected:
    """A case of an operation in a dtype."""

    operation: str
    case: Case
    dtype: str


def select(settings: Settings) -> list[Selected]:
    """The cases that settings with a definite size and dtypes ask for.

    Raises:
        ValueError: an operation is unknown, or nothing matches.
    """
    names = settings.operations or tuple(sorted(OPERATIONS))
    for name in names:
        get_operation(name)
    sized = {name: _of_size(name, settings.size) for name in names}
    found = [
        Selected(name, case, dtype)
        for name, cases in sized.items()
        for case in cases
        if fnmatch.fnmatchcase(case.name, settings.case)
        for dtype in settings.dtypes
        if case.fits(dtype)
    ]
    if not found:
        _refuse(settings, sized)
    return found


def _of_size(operation: str, size: str) -> Sequence[Case]:
    cases: Sequence[Case] = operation_module(operation, "cases").CASES
    tag = SIZES[size]
    return [case for case in cases if (tag in case.tags if tag else not case.is_benchmark)]


def _refuse(settings: Settings, sized: dict[str, Sequence[Case]]) -> None:
    known = [case.name for cases in sized.values() for case in cases]
    where = f"of {', '.join(sized)} with size {settings.size}" if len(sized) < len(OPERATIONS) else f"with size {settings.size}"
    if not known:
        others = [size for size in SIZES if any(_of_size(name, size) for name in sized)]
        raise invalid("--size", repr(settings.size), f"a size of which there are cases: {', '.join(others)}")
    some = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
    raise invalid("--case", repr(settings.case), f"a case {where}: {some}" + suggestion(settings.case, known))
