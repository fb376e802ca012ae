"""One case before and now: a verdict for each of its runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ejkernel.errors import invalid
from ejkernel_bench._document import Case, Run, common_samples
from ejkernel_bench._statistics import LogRatio

WORSE = ("slower", "newly wrong", "newly failed", "newly refused", "gone")
"""Verdicts that are regressions when the run is one of ours."""

ORDER = (*WORSE, "unclear", "fixed", "faster", "new", "not compared", "same")
"""All verdicts, worst first."""


@dataclass(frozen=True)
class Rule:
    """When a difference counts.

    Args:
        threshold: smallest relative change of the median, in either direction: 0.05 is a factor of 1.05.
        confidence: of the bootstrap interval of the ratio.
        samples: fewer timed rounds than this, on either side, decide nothing.
    """

    threshold: float = 0.05
    confidence: float = 0.99
    samples: int = 5

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < math.inf:
            raise invalid("threshold", self.threshold, "a relative change >= 0")
        if not 0 < self.confidence < 1:
            raise invalid("confidence", self.confidence, "a value between 0 and 1")
        if self.samples < 1:
            raise invalid("samples", self.samples, "a value >= 1")


@dataclass(frozen=True)
class Change:
    """One run of one case. `ratio` is new time over old, so above 1 is slower; it lies in `interval`."""

    operation: str
    case: str
    dtype: str
    phase: str
    run: str
    kind: str
    verdict: str
    old_s: float | None = None
    new_s: float | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    note: str = ""

    @property
    def regression(self) -> bool:
        """One of ours is worse. A case that was not measured again is not."""
        return self.kind == "ours" and self.verdict in WORSE


def changes_of(old: Case | None, new: Case | None, rule: Rule, *, by_peers: bool) -> Iterator[Change]:
    """Verdicts on a case of which at least one side is there."""
    if new is None:
        yield from (_change(old, run, None, "not compared", "not measured now") for run in old.runs) if old else ()
        return
    if old is None:
        yield from (_change(new, None, run, "new") for run in new.runs)
        return
    yardstick = _peers_change(old, new, rule) if by_peers else None
    before, after = ({run.name: run for run in case.runs} for case in (old, new))
    for name in dict.fromkeys((*before, *after)):
        yield _judge(new, before.get(name), after.get(name), rule, by_peers, yardstick)
    if old.ours and new.ours and old.ours.name != new.ours.name:
        change = _judge(new, old.ours, new.ours, rule, by_peers, yardstick)
        yield replace(change, run="chosen by dispatch", note=f"{old.ours.name} before, {new.ours.name} now")


def _judge(case: Case, before: Run | None, after: Run | None, rule: Rule, by_peers: bool, yardstick: LogRatio | None) -> Change:
    if before is None or after is None:
        return _change(case, before, after, "gone" if after is None else "new")
    if not after.ok:
        verdict = f"newly {'failed' if after.status == 'ok' else after.status}" if before.ok else "not compared"
        return _change(case, before, after, verdict, after.reason or f"{after.status}, as before")
    if not before.ok:
        return _change(case, before, after, "fixed", f"{before.status} before")
    samples = common_samples(before, after)
    if samples is None:
        return _change(case, before, after, "not compared", f"{before.clock} time before, {after.clock} time now")
    if min(map(len, samples)) < rule.samples:
        return _change(case, before, after, "unclear", f"fewer than {rule.samples} samples")
    old, new = samples
    moved = LogRatio.of(new, old, f"{case.label} {after.name}")
    if by_peers:
        if after.kind == "peer" or yardstick is None:
            note = "peers are the yardstick" if after.kind == "peer" else "no peer that both files time"
            return _change(case, before, after, "not compared", note)
        moved = moved - yardstick
    return _measured(_change(case, before, after, "same"), moved, rule)


def _measured(change: Change, moved: LogRatio, rule: Rule) -> Change:
    """The verdict by the rule."""
    low, high = moved.interval(rule.confidence)
    verdict, factor = "same", 1 + rule.threshold
    if not 1 / factor < moved.ratio < factor:
        verdict = "unclear" if low <= 1 <= high else "slower" if moved.ratio > 1 else "faster"
    return replace(change, verdict=verdict, ratio=moved.ratio, interval=(low, high))


def _peers_change(old: Case, new: Case, rule: Rule) -> LogRatio | None:
    """How much the peers that both sides time have moved."""
    before = {run.name: run for run in old.runs if run.kind == "peer" and run.ok}
    moved: list[LogRatio] = []
    for run in new.runs:
        if run.kind == "peer" and run.ok and run.name in before:
            samples = common_samples(before[run.name], run)
            if samples and min(map(len, samples)) >= rule.samples:
                moved.append(LogRatio.of(samples[1], samples[0], f"{new.label} {run.name}"))
    return LogRatio.mean(moved) if moved else None


def _change(case: Case | None, before: Run | None, after: Run | None, verdict: str, note: str = "") -> Change:
    run = after or before
    assert case is not None and run is not None
    old_s, new_s = (one.seconds if one and one.ok else None for one in (before, after))
    return Change(*case.key, run.name, run.kind, verdict, old_s, new_s, note=note)
