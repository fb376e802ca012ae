"""What was measured, as the plain data that a result file holds."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ejkernel.testing.dispatch import describe_call
from ejkernel_bench._problem import BenchProblem
from ejkernel_bench._trial import Trial


@dataclasses.dataclass(frozen=True)
class Limits:
    """Rates that nothing on the device passes."""

    flops_per_s: Mapping[str, float]
    bytes_per_s: float

    @classmethod
    def of(cls, measured: Mapping[str, Any]) -> Limits:
        return cls(measured["flops_per_s"], measured["bytes_per_s"])


def described(problem: BenchProblem, limits: Limits, trials: Sequence[Trial]) -> dict[str, Any]:
    """One phase of a case with all its runs."""
    cost, dtype = problem.cost, problem.selected.dtype
    times = {"flops": cost.flops / limits.flops_per_s[dtype], "bytes": cost.bytes / limits.bytes_per_s}
    least = max(times.values())
    return {
        "operation": problem.selected.operation,
        "case": problem.selected.case.name,
        "dtype": dtype,
        "phase": problem.title,
        "call": describe_call(problem.request.call),
        "flops": float(cost.flops),
        "bytes": float(cost.bytes),
        "limit_s": least,
        "limited_by": max(times, key=lambda name: times[name]),
        "reference": problem.expected[1] if any(trial.errors for trial in trials) else None,
        "runs": [_run(trial, cost.flops, cost.bytes, least) for trial in trials],
    }


def _run(trial: Trial, flops: float, moved: float, least: float) -> dict[str, Any]:
    program = trial.program
    samples = trial.device or trial.wall
    took = statistics.median(samples) if samples else None
    rates = {"flops_per_s": flops, "bytes_per_s": moved, "fraction": least}
    errors = {name: (error.found.norm, error.found.element) for name, error in trial.errors.items()}
    return {
        "name": trial.name,
        "kind": "ours" if trial.ours else "peer",
        "chosen": trial.chosen,
        "implementation": trial.name if trial.ours else None,
        "config": trial.config,
        "tier": trial.tier,
        "status": trial.status,
        "reason": trial.reason,
        "error": {name: {"norm": _finite(norm), "element": _finite(element)} for name, (norm, element) in errors.items()},
        "wall_s": trial.wall or None,
        "device_s": trial.device or None,
        "compile_s": statistics.median(program.compile_s) if program and program.compile_s else None,
        "temporary_bytes": program.temporary_bytes if program else None,
        **{name: None if took is None else work / took for name, work in rates.items()},
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if abs(value) < float("inf") else None
