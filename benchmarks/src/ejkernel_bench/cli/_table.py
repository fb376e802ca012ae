"""Tables of `ejkernel bench`: a case with its runs, and the cases that ours loses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ejkernel.cli.output import say, table
from ejkernel_bench._document import Case, Run, parse_case
from ejkernel_bench._standing import Standing, against
from ejkernel_bench._units import three_digits


def show_case(screen: Any, found: Mapping[str, Any]) -> None:
    """One phase of a case: a row for each run that was timed or should have been, and who refused."""
    case = parse_case(found)
    rows = [_row(case, run, found["limited_by"]) for run in case.runs if run.status != "refused"]
    screen.print()
    against_whom = f"; errors against {found['reference']}" if found["reference"] else ""
    title = f"{case.label}  (limit {_milliseconds(case.limit_s)} ms{against_whom})"
    say(screen, title, style="bold")
    unit = "TFLOP/s" if found["limited_by"] == "flops" else "GB/s"
    columns = ("run", "verdict", "ms", unit, "limit", "error", "compile")
    screen.print(table(columns, rows or [("-", "nothing runs it here", *[""] * 5)], wrap=("verdict",)))
    for run in case.runs:
        if run.status not in ("ok", "refused"):
            say(screen, f"{run.status}: {run.name}: {run.reason}", style="bold red")
    refused = [f"{run.name} ({run.reason})" for run in case.runs if run.status == "refused"]
    if refused:
        say(screen, f"refused: {'; '.join(refused)}", style="dim")


def _row(case: Case, run: Run, limited_by: str) -> tuple[Any, ...]:
    error = "" if run.largest_error is None else f"{run.largest_error:.1e}"
    if not run.ok:
        return (run.name, _verdict(run, None), "", "", "", error, "")
    low, high = np.quantile(run.samples, (0.25, 0.75))
    work = 1e-12 * case.flops if limited_by == "flops" else 1e-9 * case.bytes
    return (
        run.name,
        _verdict(run, against(case, run)),
        f"{_milliseconds(run.seconds)} ±{(high - low) / 2 / run.seconds:.0%}",
        f"{work / run.seconds:.4g}",
        f"{case.limit_s / run.seconds:.0%}",
        error,
        "" if run.compile_s is None else f"{run.compile_s:.2f}",
    )


def _verdict(run: Run, found: Standing | None) -> Any:
    """Of ours, whether dispatch chooses it; of a peer its time over ours; of either what went wrong."""
    from rich.text import Text

    if not run.ok:
        return Text(run.status, style="bold red")
    if run.chosen:
        return Text("chosen", style="green")
    ratio = f" x{found.ratio:.2f}" if found and found.ratio is not None else ""
    if run.kind == "ours":
        return Text(f"ours{ratio}", style="green")
    word = {"loss": "LOSS", "even": "even"}.get(found.word, "peer") if found else "peer"
    return Text(f"{word}{ratio}", style="bold red" if word == "LOSS" else "dim")


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 0.1 else three_digits(1e3 * seconds)


def show_end(screen: Any, result: Mapping[str, Any]) -> None:
    """What was measured on, its limits, and the cases in which a peer is faster."""
    limits, settings = result["limits"], result["settings"]
    rates = ", ".join(f"{dtype} {1e-12 * rate:.3g} TFLOP/s" for dtype, rate in limits["flops_per_s"].items())
    device = f"{result['device']['kind']}, {settings['clock']} time, {settings['rounds']} rounds"
    screen.print()
    say(screen, f"{device}; limits: {rates}, {1e-9 * limits['bytes_per_s']:.4g} GB/s")
    say(
        screen, "x: time over that of the chosen one; limit: share of the fastest that the device could be; compile: in seconds"
    )
    _show_losses(screen, [parse_case(case) for case in result["cases"]])


def _show_losses(screen: Any, cases: Sequence[Case]) -> None:
    found = [(case, run.name, against(case, run)) for case in cases for run in case.runs if run.kind == "peer" and run.ok]
    compared = len({case.key for case, _, standing in found if standing.ratio is not None})
    lost = sorted(((s.ratio, case, name) for case, name, s in found if s.word == "loss" and s.ratio), key=lambda one: one[0])
    if not lost:
        screen.print(f"no peer is faster in {compared} cases with peers", markup=False)
        return
    rows = [
        (f"{case.operation} {case.case}", case.dtype, case.phase, name, case.ours.name if case.ours else "", f"{ratio:.2f}")
        for ratio, case, name in lost
    ]
    title = f"a peer is faster in {len({case.key for _, case, _ in lost})} of {compared} cases with peers"
    screen.print(table(("case", "dtype", "phase", "peer", "ours", "its time / ours"), rows, title=title, wrap=("case",)))
