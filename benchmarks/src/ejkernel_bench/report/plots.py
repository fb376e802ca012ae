"""Pictures of a recorded run: one for each operation, and one of all ratios for the README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ejkernel_bench._document import Case, Document, as_document
from ejkernel_bench._standing import Standing, standing
from ejkernel_bench._units import seconds_text, three_digits
from ejkernel_bench.report._canvas import LINE, LOSS, SOFT, figure, log_ticks, marks, save
from ejkernel_bench.report.overview import write_overview


def write_plots(result: Document | Mapping[str, Any], folder: str | Path) -> list[Path]:
    """Write `overview.png` and one `<operation>.png` each; returns the paths.

    Raises:
        ImportError: matplotlib is not installed.
    """
    document, folder = as_document(result), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    operations = sorted({case.operation for case in document.cases})
    paths = [write_overview(document, folder / "overview.png")]
    return paths + [write_operation(document, operation, folder / f"{operation}.png") for operation in operations]


def write_operation(document: Document, operation: str, path: str | Path) -> Path:
    """Times of everything that ran an operation, a row for each case and a panel for each phase."""
    cases = [case for case in document.cases if case.operation == operation]
    phases = sorted({case.phase for case in cases}, key=lambda phase: (phase != "forward", phase))
    rows = list(dict.fromkeys((case.case, case.dtype) for case in cases))
    height = 1.15 + 0.27 * len(rows)
    made, axes = figure(3.0 + 3.7 * len(phases), height, ncols=len(phases), sharey=True, squeeze=False)
    style = marks(cases)
    for axis, phase in zip(axes[0], phases, strict=True):
        _panel(axis, [case for case in cases if case.phase == phase], rows, style)
        axis.set_title(f"{operation}, {phase}", loc="left", fontsize=10)
    dtypes = {dtype for _, dtype in rows}
    axes[0][0].set_yticks(range(len(rows)), [name if len(dtypes) == 1 else f"{name}  {dtype}" for name, dtype in rows])
    axes[0][0].set_ylim(len(rows) - 0.4, -0.6)
    _legend(made, style)
    made.suptitle(
        f"{document.kind}, {', '.join(sorted(dtypes))}: median time; to the right, best peer / ours", fontsize=8, color=SOFT
    )
    return save(made, Path(path))


def _panel(axis: Any, cases: Sequence[Case], rows: list[tuple[str, str]], style: dict[str, dict[str, Any]]) -> None:
    axis.set_xscale("log")
    axis.grid(axis="x", color=LINE, linewidth=0.6)
    axis.set_axisbelow(True)
    for case in cases:
        row, found = rows.index((case.case, case.dtype)), standing(case)
        _bridge(axis, case, row, found)
        if case.limit_s > 0:
            axis.plot([case.limit_s], [row], marker="|", markersize=11, markeredgewidth=1.5, color=SOFT, linestyle="none")
        for run in sorted(case.runs, key=lambda run: run.kind == "ours"):
            if run.ok:
                hollow = {"markerfacecolor": "white"} if run.kind == "ours" and run is not case.ours else {}
                axis.plot([run.seconds], [row], markersize=6, linestyle="none", **style[run.name], **hollow)
        words, colour = _words(found)
        axis.text(1.01, row, words, transform=axis.get_yaxis_transform(), va="center", color=colour, fontsize=8)
    low, high = axis.get_xlim()
    axis.set_xticks(log_ticks(low, high))
    axis.xaxis.set_major_formatter(lambda value, _: seconds_text(value * 1.0000001).replace(".00", "").replace(".0 ", " "))
    axis.set_xlim(low, high)
    axis.minorticks_off()


def _bridge(axis: Any, case: Case, row: int, found: Standing) -> None:
    """The way from ours to the best peer."""
    if case.ours and case.best_peer:
        ends = [case.ours.seconds, case.best_peer.seconds]
        axis.plot(ends, [row, row], color=LOSS if found.word == "loss" else LINE, linewidth=2.5, alpha=0.6, zorder=1)


def _words(found: Standing) -> tuple[str, str]:
    if found.ratio is None:
        return ("no result", LOSS) if found.word == "missing" else ("", SOFT)
    text = f"{three_digits(found.ratio)}x"
    return (f"{text} {found.word}" if found.word in ("loss", "even") else text, LOSS if found.word == "loss" else SOFT)


def _legend(made: Any, style: dict[str, dict[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linestyle="none", label=name, **look) for name, look in style.items()]
    handles.append(Line2D([], [], linestyle="none", marker="|", markersize=11, color=SOFT, label="limit of the device"))
    made.legend(handles=handles, loc="outside lower left", ncols=min(len(handles), 6), frameon=False, fontsize=8)
