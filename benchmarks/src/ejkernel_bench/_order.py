"""A recorded result under today's default order, which may have changed because of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ejkernel.call.order import Priority, default_priority
from ejkernel.operations import operation_module
from ejkernel.plugin import Phase, Target
from ejkernel.testing.shapes import bound_shapes
from ejkernel_bench._document import Case, Document


def target_of(document: Document) -> Target:
    """The device of a recorded result."""
    device = document.device
    return Target(device["backend"], device["kind"], device.get("capability"))


def priorities(
    target: Target, operation: str, case: str, dtype: str, phase: Phase, names: Iterable[str]
) -> dict[str, Priority]:
    """Where implementations, named by their ids, stand for one phase of a named case."""
    cases = {one.name: one for one in operation_module(operation, "cases").CASES}
    call = bound_shapes(operation, cases[case], dtype)[1]
    return {name: default_priority(name, operation, call, phase, target) for name in names}


def as_dispatched_now(document: Document) -> Document:
    """The same times, with that run of ours as the chosen one that dispatch picks today among those that were timed."""
    return dataclasses.replace(document, cases=tuple(_as_dispatched_now(case, target_of(document)) for case in document.cases))


def _as_dispatched_now(case: Case, target: Target) -> Case:
    names = [run.name for run in case.runs if run.kind == "ours" and run.ok]
    if len(names) < 2:
        return case
    found = priorities(target, *case.key, names)  # pyright: ignore[reportArgumentType]
    first = max(names, key=lambda name: found[name].level)
    runs = tuple(dataclasses.replace(run, chosen=run.name == first) if run.kind == "ours" else run for run in case.runs)
    return dataclasses.replace(case, runs=runs)
