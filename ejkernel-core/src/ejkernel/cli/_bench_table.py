"""Tables of `ejkernel bench`: a case with its runs, and the cases that ours loses."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ejkernel.bench import losses, time_of
from ejkernel.bench._result import ours_of, ratio_of
from ejkernel.cli._output import table

_COLUMNS = ("run", "ms", "x ours", "rate", "of limit", "error", "compile s", "")


def show_case(screen: Any, case: Mapping[str, Any]) -> None:
    """One phase of a case: a row for each run that was timed or should have been."""
    title = f"{case['operation']} {case['case']} {case['dtype']} {case['phase']}"
    limit = f"limit {1e3 * case['limit_s']:.4g} ms"
    ours = ours_of(case)
    rows = [_row(run, ours, case["limited_by"] == "flops") for run in case["runs"] if run["status"] != "refused"]
    screen.print()
    screen.print(f"{title}  ({limit})", style="bold", markup=False, soft_wrap=True)
    screen.print(table(_COLUMNS, rows or [("-", "", "", "", "", "", "", "nothing runs it here")]))
    for run in case["runs"]:
        if run["status"] == "refused":
            screen.print(f"{run['name']}: refused: {run['reason']}", style="dim", markup=False, soft_wrap=True)


def _row(run: Mapping[str, Any], ours: Mapping[str, Any] | None, by_work: bool) -> tuple[Any, ...]:
    from rich.text import Text

    took = time_of(run)
    if took is None:
        remark = Text(f"{run['status']}: {run['reason']}", style="bold red")
        return (_name(run), "", "", "", "", _error(run), "", remark)
    ratio = ratio_of(run, ours) if ours is not None else None
    lost = run["kind"] == "peer" and ratio is not None and ratio < 1
    rate = f"{1e-12 * run['flops_per_s']:.4g} TFLOP/s" if by_work else f"{1e-9 * run['bytes_per_s']:.4g} GB/s"
    remark = Text("LOSS", style="bold red") if lost else Text("chosen" if run["chosen"] else "", style="green")
    return (
        _name(run),
        f"{1e3 * took:.4g} ± {1e3 * spread(run):.2g}",
        "" if ratio is None else f"{ratio:.2f}",
        rate,
        f"{run['fraction']:.2f}",
        _error(run),
        "" if run["compile_s"] is None else f"{run['compile_s']:.2f}",
        remark,
    )


def _name(run: Mapping[str, Any]) -> str:
    return f"ours: {run['name']}" if run["kind"] == "ours" else run["name"]


def _error(run: Mapping[str, Any]) -> str:
    """The largest error in the norm."""
    found = [error["norm"] for error in run["error"].values()]
    return "" if not found else "inf" if None in found else f"{max(found):.1e}"


def spread(run: Mapping[str, Any]) -> float:
    """Half the distance of the quartiles of the samples that count."""
    samples: Sequence[float] = run["device_s"] or run["wall_s"]
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4)
    return (high - low) / 2


def show_head(screen: Any, result: Mapping[str, Any]) -> None:
    """What was measured on, and its limits."""
    limits = result["limits"]
    rates = ", ".join(f"{dtype} {1e-12 * rate:.3g} TFLOP/s" for dtype, rate in limits["flops_per_s"].items())
    device = f"{result['device']['kind']}, {result['settings']['clock']} time, {result['settings']['rounds']} rounds"
    screen.print()
    screen.print(f"{device}; limits: {rates}, {1e-9 * limits['bytes_per_s']:.4g} GB/s", markup=False, soft_wrap=True)


def losses_table(screen: Any, cases: Sequence[Mapping[str, Any]]) -> None:
    """The cases in which a peer is faster."""
    found = losses(cases)
    compared = sum(ours_of(case) is not None and any(_timed_peer(run) for run in case["runs"]) for case in cases)
    if not found:
        screen.print(f"no loss in {compared} cases with peers", markup=False)
        return
    rows = [(f"{one.operation} {one.case}", one.dtype, one.phase, one.peer, one.ours, f"{one.ratio:.2f}") for one in found]
    count = len({(one.operation, one.case, one.dtype, one.phase) for one in found})
    title = f"a peer is faster in {count} of {compared} cases with peers"
    screen.print(table(("case", "dtype", "phase", "peer", "ours", "its time / ours"), rows, title=title, wrap=("case",)))


def _timed_peer(run: Mapping[str, Any]) -> bool:
    return run["kind"] == "peer" and time_of(run) is not None
