"""A recorded result under today's default order, which may have changed because of it."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable

from ejkernel._priority import Standing, standing_of
from ejkernel.plugin import Phase
from ejkernel.testing.shapes import bound_shapes
from ejkernel_bench._document import Case, Document


def standings(backend: str, operation: str, case: str, dtype: str, phase: Phase, names: Iterable[str]) -> dict[str, Standing]:
    """Where implementations, named by their ids, stand for one phase of a named case."""
    cases = {one.name: one for one in importlib.import_module(f"ejkernel.operations.{operation}.cases").CASES}
    call = bound_shapes(operation, cases[case], dtype)[1]
    return {name: standing_of(name, operation, backend, call, phase) for name in names}


def as_dispatched_now(document: Document) -> Document:
    """The same times, with that run of ours as the chosen one that dispatch picks today among those that were timed."""
    return dataclasses.replace(
        document, cases=tuple(_as_dispatched_now(case, document.device["backend"]) for case in document.cases)
    )


def _as_dispatched_now(case: Case, backend: str) -> Case:
    names = [run.name for run in case.runs if run.kind == "ours" and run.ok]
    if len(names) < 2:
        return case
    found = standings(backend, *case.key, names)  # pyright: ignore[reportArgumentType]
    first = max(names, key=lambda name: found[name].level)
    runs = tuple(dataclasses.replace(run, chosen=run.name == first) if run.kind == "ours" else run for run in case.runs)
    return dataclasses.replace(case, runs=runs)
