"""Charts in plain HTML: a row for each case, a mark for each run on a logarithmic axis of time. They read without a script and on a
phone, and take their colours from the page: `--run-0` to `--run-11`, `--loss`, `--soft`, `--line`, `--page`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from ejkernel_bench._document import Case, Run, run_kinds
from ejkernel_bench._history import Recorded
from ejkernel_bench._standing import Standing, standing
from ejkernel_bench._units import seconds_text, three_digits
from ejkernel_bench.report._canvas import COLOURS, log_ticks

_ROUND = "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0"
_CORNERS = ("M-4.5 -4.5h9v9h-9z", "M0 -5.5L5.2 4.5H-5.2z", "M0 -6L6 0L0 6L-6 0z", "M-5.2 -4.5H5.2L0 5.5z")

Look = tuple[int, str]
"""Colour and shape of a run."""


def looks(cases: Sequence[Case]) -> dict[str, Look]:
    """Name of a run that has a time -> its look: ours are round, peers have corners, and no two share a colour while it lasts."""
    timed = {run.name for case in cases for run in case.runs if run.ok}
    kinds = {name: kind for name, kind in run_kinds(cases).items() if name in timed}
    peers = [name for name, kind in kinds.items() if kind == "peer"]
    shapes = {name: _CORNERS[place % len(_CORNERS)] for place, name in enumerate(peers)}
    return {name: (place % len(COLOURS), shapes.get(name, _ROUND)) for place, name in enumerate(kinds)}


def legend(styles: Mapping[str, Look]) -> str:
    """What the marks are."""
    entries = [f"<li>{_mark(look, hollow=False)} {escape(name)}</li>" for name, look in styles.items()]
    return f'<ul class="bench-legend">{"".join(entries)}<li><i class="bench-limit"></i> limit of the device</li></ul>'


def chart(rows: Sequence[Recorded], styles: Mapping[str, Look]) -> str:
    """The rows of one device, dtype and phase."""
    values = [run.seconds for row in rows for run in row.case.runs if run.ok]
    values += [row.case.limit_s for row in rows if row.case.limit_s > 0]
    if not values:
        return "<p>Nothing here has a time.</p>"
    low, high = math.log(min(values)), math.log(max(values))
    pad = max(0.06 * (high - low), 0.15)
    low, high = low - pad, high + pad

    def at(seconds: float) -> str:
        return f"{100 * (math.log(seconds) - low) / (high - low):.1f}%"

    ticks = log_ticks(math.exp(low), math.exp(high))
    every = max(1, math.ceil(len(ticks) / 5))
    axis = "".join(_label(at(tick), _tick(tick)) for tick in ticks[::every])
    several = {row.case.case for row in rows if sum(other.case.case == row.case.case for other in rows) > 1}
    lines = [_row(row, at, styles, dated=row.case.case in several) for row in rows]
    return f'<div class="bench-chart"><div class="bench-axis"><div>{axis}</div></div>{"".join(lines)}</div>'


def _row(row: Recorded, at: object, styles: Mapping[str, Look], *, dated: bool) -> str:
    assert callable(at)
    case, found = row.case, standing(row.case)
    marks = [f'<i class="bench-limit" style="left:{at(case.limit_s)}"></i>'] if case.limit_s > 0 else []
    for run in sorted((run for run in case.runs if run.ok), key=lambda run: run is case.ours):
        hollow = run.kind == "ours" and run is not case.ours
        marks.append(_mark(styles[run.name], hollow=hollow, left=str(at(run.seconds)), title=_about(run, case)))
    day = f" <small>{row.document.date[:10]}</small>" if dated else ""
    lost = ' class="bench-loss"' if found.word in ("loss", "missing") else ""
    return (
        f'<div class="bench-row"><code>{escape(short(case))}</code>{day}<div class="bench-plot">{"".join(marks)}</div>'
        f"<b{lost}>{verdict(found)}</b></div>"
    )


def short(case: Case) -> str:
    """Its name, without what all of them begin with."""
    return case.case.removeprefix("bench-")


def verdict(found: Standing) -> str:
    """How ours stands, in a word or two."""
    if found.ratio is None:
        return "no result of ours" if found.word == "missing" else "-"
    return f"{three_digits(found.ratio)}x" + {"win": "", "even": " unresolved", "loss": " loss"}[found.word]


def _about(run: Run, case: Case) -> str:
    limit = f", {case.limit_s / run.seconds:.2f} of the limit" if case.limit_s > 0 else ""
    return f"{run.name}: {seconds_text(run.seconds)} on the {run.clock}'s clock{limit}"


def _mark(look: Look, *, hollow: bool, left: str | None = None, title: str = "") -> str:
    colour, path = look
    ink = f"var(--run-{colour})"
    fill = f'fill="var(--page)" stroke="{ink}" stroke-width="2"' if hollow else f'fill="{ink}" stroke="var(--page)"'
    where = f' style="left:{left}"' if left else ""
    text = f"<title>{escape(title)}</title>" if title else ""
    return f'<svg class="bench-mark" viewBox="-8 -8 16 16" width="16" height="16"{where}>{text}<path d="{path}" {fill}/></svg>'


def _label(left: str, text: str) -> str:
    """A number at the axis, which ends there where it would leave the page."""
    inwards = ";transform:translateX(-100%)" if float(left[:-1]) > 92 else ""
    return f'<span style="left:{left}{inwards}">{text}</span>'


def _tick(seconds: float) -> str:
    return seconds_text(seconds * (1 + 1e-9)).replace(".00", "").replace(".0 ", " ")
