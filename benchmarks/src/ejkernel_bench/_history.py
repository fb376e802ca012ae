"""What several recorded runs say of one case: the newest counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
