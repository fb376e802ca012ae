"""How ours stands against the best peer of a case."""

from __future__ import annotations

from dataclasses import dataclass

from ejkernel_bench._document import Case, Run, common_samples
from ejkernel_bench._statistics import LogRatio

CONFIDENCE = 0.99


@dataclass(frozen=True)
class Standing:
    """`word` is win, loss, even, alone (no peer has a time) or missing (what dispatch chose has none).

    `ratio` is the time of `peer`, the fastest, over ours; above 1 is a win. A loss is a loss by however little; what the interval
    cannot tell from 1 is even.
    """

    word: str
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    peer: str | None = None


def standing(case: Case) -> Standing:
    """What a user of the default choice gets, compared with the fastest peer."""
    if case.ours is None:
        return Standing("missing")
    return against(case, case.best_peer)


def against(case: Case, peer: Run | None) -> Standing:
    """The same compared with one peer."""
    samples = common_samples(peer, case.ours) if peer and case.ours else None
    if samples is None or peer is None:
        return Standing("alone")
    found = LogRatio.of(*samples, case.label)
    low, high = found.interval(CONFIDENCE)
    word = "even" if low <= 1 <= high else "win" if low > 1 else "loss"
    return Standing(word, found.ratio, (low, high), peer.name)
