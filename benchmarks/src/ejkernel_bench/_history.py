"""What several recorded runs say of one case: the newest counts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ejkernel_bench._document import Case, Document
from ejkernel_bench._order import as_dispatched_now
from ejkernel_bench._standing import Standing, against


@dataclass(frozen=True)
class Compared:
    """A case beside the peer that stands best against it, and the record and day of that."""

    record: str
    made: str
    case: Case
    standing: Standing


def newest(documents: Sequence[tuple[str, Document]]) -> dict[str, list[Compared]]:
    """Kind of device -> every case that a peer ran too, under today's default order, the worst first.

    Of records of one case beside one peer the newest counts; of its peers the one that is fastest beside ours.
    """
    kinds: dict[str, dict[tuple[str, ...], Compared]] = {}
    for name, document in sorted(documents, key=lambda pair: pair[1].date):
        for case in as_dispatched_now(document).cases:
            for peer in (run for run in case.runs if run.kind == "peer" and run.ok):
                if (found := against(case, peer)).word != "alone":
                    kinds.setdefault(document.kind, {})[*case.key, peer.name] = Compared(name, document.date[:10], case, found)
    worst: dict[str, list[Compared]] = {}
    for kind, found in sorted(kinds.items()):
        cases: dict[tuple[str, ...], Compared] = {}
        for one in sorted(found.values(), key=lambda one: one.standing.ratio or 0):
            cases.setdefault(one.case.key, one)
        worst[kind] = list(cases.values())
    return worst


@dataclass(frozen=True)
class Recorded:
    """A case of a record with ours and those peers of which no newer record has it."""

    record: str
    document: Document
    case: Case


def current(documents: Sequence[tuple[str, Document]]) -> dict[str, list[Recorded]]:
    """Kind of device -> its cases under today's default order, by name, of one case the newest record first.

    A peer is left where its newest time is; a record is left out where it adds no peer and is not the newest.
    """
    found: dict[str, list[Recorded]] = {}
    seen: set[tuple[str, ...]] = set()
    for name, document in sorted(documents, key=lambda pair: pair[1].date, reverse=True):
        for case in as_dispatched_now(document).cases:
            runs = [run for run in case.runs if run.kind == "ours" or (document.kind, *case.key, run.name) not in seen]
            peers = {(document.kind, *case.key, run.name) for run in runs if run.kind == "peer" and run.ok}
            if peers or (document.kind, *case.key) not in seen:
                found.setdefault(document.kind, []).append(Recorded(name, document, replace(case, runs=runs)))
            seen |= {(document.kind, *case.key), *peers}
    return {kind: sorted(cases, key=lambda one: _by_size(one.case)) for kind, cases in sorted(found.items())}


def _by_size(case: Case) -> tuple[object, ...]:
    """The phases apart, forward first; within one by the words of the name and then by its numbers: the same shape by its size."""
    numbers = re.split(r"(\d+)", case.case)
    return case.operation, case.dtype, case.phase != "forward", case.phase, numbers[::2], [int(one) for one in numbers[1::2]]
