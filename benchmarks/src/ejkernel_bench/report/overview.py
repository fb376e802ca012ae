"""The picture for the README: how ours stands against the best peer, every case of every operation on one axis."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from ejkernel_bench._document import Document
from ejkernel_bench._standing import Standing, standing
from ejkernel_bench._units import three_digits
from ejkernel_bench.report._canvas import COLOURS, LINE, LOSS, SOFT, figure, log_ticks, save

SHAPES = {"forward": "o", "backward": "^", "forward+backward": "s"}


def write_overview(document: Document, path: str | Path) -> Path:
    """Ratios of times, best peer over ours: a row for each operation, a mark for each case; left of 1 we lose.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows: dict[str, list[tuple[str, Standing]]] = {}
    for case in document.cases:
        found = standing(case)
        if found.ratio is not None:
            rows.setdefault(case.operation, []).append((case.phase, found))
    made, axis = figure(8.2, 1.35 + 0.29 * max(1, len(rows)))
    _frame(axis, [found.ratio for row in rows.values() for _, found in row if found.ratio is not None])
    names = sorted(rows)
    for index, name in enumerate(names):
        _row(axis, index, rows[name])
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_title(f"ejkernel against the fastest peer, {document.kind}", loc="left", pad=16, fontsize=10)
    axis.set_xlabel("time of the best peer / ours, logarithmic; one mark for each case")
    _legend(made, {phase for row in rows.values() for phase, _ in row})
    return save(made, Path(path))


def _frame(axis: Any, ratios: list[float]) -> None:
    """A logarithmic axis that shows both sides of 1, and says which is which."""
    low, high = min([*ratios, 0.8]) / 1.15, max([*ratios, 1.25]) * 1.15
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    axis.axvspan(low, 1, color=LOSS, alpha=0.07, linewidth=0)
    axis.axvline(1, color=SOFT, linewidth=1)
    axis.set_xticks(log_ticks(low, high))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axis.minorticks_off()
    axis.grid(axis="x", color=LINE, linewidth=0.6)
    axis.set_axisbelow(True)
    top = axis.get_xaxis_transform()
    axis.text(0.99, 1.0, "slower ", transform=top, ha="right", va="bottom", color=LOSS, fontsize=8)
    axis.text(1.01, 1.0, " faster", transform=top, ha="left", va="bottom", color=SOFT, fontsize=8)


def _row(axis: Any, index: int, found: list[tuple[str, Standing]]) -> None:
    """Marks of one operation, a little apart so that equal ones show; to the right, how many are lost."""
    offsets = np.linspace(-0.18, 0.18, len(found)) if len(found) > 1 else [0.0]
    for (phase, at), offset in zip(sorted(found, key=lambda item: item[1].ratio or 0), offsets, strict=True):
        look = {"color": LOSS} if at.word == "loss" else {"color": COLOURS[0]}
        if at.word == "even":
            look = {"markerfacecolor": "white", "markeredgecolor": SOFT}
        axis.plot(
            [at.ratio], [index + offset], marker=SHAPES.get(phase, "D"), markersize=5, linestyle="none", alpha=0.85, **look
        )
    lost = sum(at.word == "loss" for _, at in found)
    middle = math.exp(float(np.mean([math.log(at.ratio) for _, at in found if at.ratio])))
    words = f"{three_digits(middle)}x" + (f", {lost} of {len(found)} lost" if lost else "")
    axis.text(1.01, index, words, transform=axis.get_yaxis_transform(), va="center", fontsize=8, color=LOSS if lost else SOFT)


def _legend(made: Any, phases: set[str]) -> None:
    from matplotlib.lines import Line2D

    order = [phase for phase in (*SHAPES, *sorted(phases)) if phase in phases]
    handles = [
        Line2D([], [], linestyle="none", marker=SHAPES.get(p, "D"), color=COLOURS[0], label=p) for p in dict.fromkeys(order)
    ]
    handles.append(Line2D([], [], linestyle="none", marker="o", color=LOSS, label="loss"))
    handles.append(Line2D([], [], linestyle="none", marker="o", markerfacecolor="white", markeredgecolor=SOFT, label="even"))
    made.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
