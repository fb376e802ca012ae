"""Two recorded runs side by side: what became faster, slower or wrong, and what cannot be said.

The rule. The change of a run is the ratio of its median times, new over old. An interval for it comes from a bootstrap of
both sets of samples. The run is `slower` (or `faster`) when the ratio is at least the threshold away from 1 *and* the interval
leaves out 1; `unclear` when it is that far away and the interval still holds 1, or there are too few samples; else `same`.
The interval deals with noise within a run, the threshold with what differs between two processes.

Times of different devices, clocks or measured limits are not like for like. Then the times of the peers that both files hold
are the yardstick: what is compared is our time over theirs (the geometric mean, where there are several), and a case without
a common peer is not compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ejkernel_bench._document import Document, as_document, read_document
from ejkernel_bench._judgement import ORDER, Change, Rule, changes_of
from ejkernel_bench._likeness import obstacles, remarks


@dataclass(frozen=True)
class Comparison:
    """What `compare` found; `regressions` decides the exit status of the command."""

    changes: Sequence[Change]
    rule: Rule
    basis: str
    obstacles: Sequence[str] = ()
    remarks: Sequence[str] = ()

    @property
    def regressions(self) -> list[Change]:
        """Runs of ours that are slower, wrong, failing, refused or missing, where they were not before."""
        return [change for change in self.changes if change.regression]

    @property
    def counts(self) -> dict[str, int]:
        """How many runs have each verdict, worst first."""
        found = Counter(change.verdict for change in self.changes)
        return {verdict: found[verdict] for verdict in ORDER if verdict in found}

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return {
            "basis": self.basis,
            "obstacles": list(self.obstacles),
            "remarks": list(self.remarks),
            "rule": asdict(self.rule),
            "counts": self.counts,
            "regressions": len(self.regressions),
            "changes": [{**asdict(change), "regression": change.regression} for change in self.changes],
        }

    def table(self, *, everything: bool = False) -> Any:
        """A rich table, worst first; what stayed the same or was not compared only if asked for."""
        from ejkernel_bench._comparison_table import comparison_table

        return comparison_table(self.changes if everything else [c for c in self.changes if c.verdict not in ORDER[-2:]])

    def summary(self) -> str:
        """On what the comparison rests and what came out, in a few lines."""
        lines = []
        if self.obstacles:
            lines += ["not like for like, so our times are compared as parts of the peers':"]
            lines += [f"  {text}" for text in self.obstacles]
        lines += [f"note: {text}" for text in self.remarks]
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items())
        rule = f"a change counts from {self.rule.threshold:.0%}, outside the {self.rule.confidence:.0%} interval"
        lines += [f"{counts or 'nothing to compare'} ({rule})", f"regressions of ours: {len(self.regressions)}"]
        return "\n".join(lines)


def compare_files(old: str | Path, new: str | Path, rule: Rule | None = None) -> Comparison:
    """Compare two files that `ejkernel bench --out` wrote.

    Raises:
        ValueError: one of them is not such a file.
        OSError: one of them cannot be read.
    """
    return compare(read_document(old), read_document(new), rule)


def compare(old: Document | Mapping[str, Any], new: Document | Mapping[str, Any], rule: Rule | None = None) -> Comparison:
    """Compare two recorded runs, run by run.

    Args:
        old: what was recorded before: a `Document`, or the JSON of one.
        new: what was recorded now.
        rule: when a difference counts.

    Returns:
        A verdict for every (operation, case, dtype, phase, run) that either holds.

    Raises:
        ValueError: `old` or `new` is not a benchmark result.
    """
    old, new = as_document(old, "old"), as_document(new, "new")
    rule, forbidden = rule or Rule(), obstacles(old, new)
    before, after = ({case.key: case for case in document.cases} for document in (old, new))
    changes = [
        change
        for key in dict.fromkeys((*before, *after))
        for change in changes_of(before.get(key), after.get(key), rule, by_peers=bool(forbidden))
    ]
    changes.sort(key=lambda change: (ORDER.index(change.verdict), -(change.ratio or 1)))
    notes = [*remarks(old, new), *_moved_peers(changes, rule)]
    return Comparison(changes, rule, "peers" if forbidden else "seconds", forbidden, notes)


def _moved_peers(changes: Sequence[Change], rule: Rule) -> list[str]:
    """A warning where code that is not ours changed its speed as a whole: then the machine may have."""
    logs = [math.log(change.ratio) for change in changes if change.kind == "peer" and change.ratio]
    mean = math.exp(sum(logs) / len(logs)) if logs else 1.0
    if 1 / (1 + rule.threshold) < mean < 1 + rule.threshold:
        return []
    return [f"the {len(logs)} timed peers take {mean:.2f} of their time before: the machine or their versions may be the cause"]
