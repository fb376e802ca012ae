"""The result of a benchmark as plain data, and what can be read from it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ejkernel.bench._problem import BenchProblem

if TYPE_CHECKING:
    from ejkernel.bench._run import Run


@dataclasses.dataclass(frozen=True)
class Limits:
    """Rates that nothing on the device passes."""

    flops_per_s: Mapping[str, float]
    bytes_per_s: float

    @classmethod
    def of(cls, measured: Mapping[str, Any]) -> Limits:
        return cls(measured["flops_per_s"], measured["bytes_per_s"])

    def seconds(self, flops: float, moved: float, dtype: str) -> float:
        """The least time that this much work takes."""
        return max(flops / self.flops_per_s[dtype], moved / self.bytes_per_s)


def described(problem: BenchProblem, call: dict[str, Any], limits: Limits, runs: Sequence[Run]) -> dict[str, Any]:
    """One phase of a case with all its runs."""
    cost, dtype = problem.cost, problem.selected.dtype
    least = limits.seconds(cost.flops, cost.bytes, dtype)
    return {
        "operation": problem.selected.operation,
        "case": problem.selected.case.name,
        "dtype": dtype,
        "phase": problem.title,
        "call": call,
        "flops": float(cost.flops),
        "bytes": float(cost.bytes),
        "limit_s": least,
        "limited_by": "flops" if cost.flops / limits.flops_per_s[dtype] >= cost.bytes / limits.bytes_per_s else "bytes",
        "reference": problem.expected[1] if any(one.errors for one in runs) else None,
        "runs": [_run(one, cost.flops, cost.bytes, least) for one in runs],
    }


def _run(run: Run, flops: float, moved: float, least: float) -> dict[str, Any]:
    program = run.program
    found: dict[str, Any] = {
        "name": run.name,
        "kind": "ours" if run.ours else "peer",
        "chosen": run.chosen,
        "implementation": run.name if run.ours else None,
        "config": run.config,
        "tier": run.tier,
        "status": run.status,
        "reason": run.reason,
        "error": {
            name: {"norm": finite(error.found.norm), "element": finite(error.found.element)}
            for name, error in run.errors.items()
        },
        "wall_s": run.wall or None,
        "device_s": run.device or None,
        "compile_s": statistics.median(program.compile_s) if program and program.compile_s else None,
        "temporary_bytes": program.temporary_bytes if program else None,
    }
    took = time_of(found)
    rates = {"flops_per_s": flops, "bytes_per_s": moved, "fraction": least}
    return {**found, **{name: None if took is None else work / took for name, work in rates.items()}}


def finite(value: float) -> float | None:
    """A number that JSON can hold; None for an infinite error."""
    return value if abs(value) < float("inf") else None


def time_of(run: Mapping[str, Any], clock: str | None = None) -> float | None:
    """The median of a run's samples on the device where there are any, else of its wall time; of one clock if it is named."""
    samples = run[clock] if clock else run["device_s"] or run["wall_s"]
    return statistics.median(samples) if samples else None


def ratio_of(run: Mapping[str, Any], ours: Mapping[str, Any]) -> float | None:
    """A run's time over ours by a clock that both have: above 1 ours is faster."""
    clock = "device_s" if run["device_s"] and ours["device_s"] else "wall_s"
    theirs, own = time_of(run, clock), time_of(ours, clock)
    return theirs / own if theirs is not None and own else None


def ours_of(case: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The run of ours that speaks for the case: the one that dispatch picks, or the fastest where that one was not timed."""
    timed = [run for run in case["runs"] if run["kind"] == "ours" and time_of(run) is not None]
    return min(timed, key=lambda run: (not run["chosen"], time_of(run)), default=None)


@dataclasses.dataclass(frozen=True)
class Loss:
    """A peer that is faster than ours: `ratio` is its time over ours."""

    operation: str
    case: str
    dtype: str
    phase: str
    peer: str
    ours: str
    ratio: float


def losses(cases: Sequence[Mapping[str, Any]]) -> list[Loss]:
    """Every peer that is faster than ours, the worst first."""
    return sorted(_losses(cases), key=lambda loss: loss.ratio)


def _losses(cases: Sequence[Mapping[str, Any]]) -> Iterator[Loss]:
    for case in cases:
        ours = ours_of(case)
        for run in case["runs"] if ours is not None else ():
            ratio = ratio_of(run, ours) if run["kind"] == "peer" and ours is not None else None
            if ratio is not None and ratio < 1 and ours is not None:
                names = (case[key] for key in ("operation", "case", "dtype", "phase"))
                yield Loss(*names, run["name"], ours["name"], ratio)
