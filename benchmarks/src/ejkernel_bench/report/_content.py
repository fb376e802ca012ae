"""What the page shows, as one JSON value: measurements with everything derived from them, and where they come from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ejkernel_bench._document import Case, Document, Run, ratio, run_kinds
from ejkernel_bench._standing import standing


def content(document: Document) -> dict[str, Any]:
    """The page's data. Only finite numbers, text, booleans and null."""
    return _finite(
        {
            "title": f"ejkernel benchmarks: {document.kind}",
            "runs": [{"name": name, "kind": kind} for name, kind in run_kinds(document.cases).items()],
            "cases": [_case(case) for case in document.cases],
            "provenance": _provenance(document),
        }
    )


def _case(case: Case) -> dict[str, Any]:
    found = standing(case)
    return {
        "operation": case.operation,
        "case": case.case,
        "dtype": case.dtype,
        "phase": case.phase,
        "call": case.call,
        "flops": case.flops,
        "bytes": case.bytes,
        "limit_s": case.limit_s,
        "standing": found.word,
        "ratio": found.ratio,
        "interval": found.interval,
        "runs": [_run(case, run) for run in case.runs],
    }


def _run(case: Case, run: Run) -> dict[str, Any]:
    """One measurement. `speaks` marks the run of ours that stands for the case."""
    shown: dict[str, Any] = {
        "name": run.name,
        "kind": run.kind,
        "speaks": run is case.ours or (case.ours is None and run.chosen),
        "status": run.status,
        "reason": run.reason,
        "error": run.largest_error,
        "detail": ", ".join(text for text in (run.implementation, run.config, run.tier and f"config from {run.tier}") if text),
        "compile_s": run.compile_s,
        "temporary_bytes": run.temporary_bytes,
    }
    if not run.ok:
        return shown
    low, high = np.quantile(run.samples, (0.25, 0.75))
    return {
        **shown,
        "time": run.seconds,
        "low": float(low),
        "high": float(high),
        "samples": len(run.samples),
        "clock": run.clock,
        "ratio": ratio(run, case.ours) if case.ours else None,
    }


def _provenance(document: Document) -> list[list[str]]:
    """Label and text, in the order in which they are read."""
    device, limits = document.device, document.limits
    rates = [f"{float(rate) / 1e12:.3g} TFLOP/s {dtype}" for dtype, rate in (limits.get("flops_per_s") or {}).items()]
    if limits.get("bytes_per_s"):
        rates.append(f"{float(limits['bytes_per_s']) / 1e9:.4g} GB/s")
    pairs = [
        ("Date", document.date),
        ("Commit", document.commit),
        ("Command", document.command),
        ("Device", _pairs(device)),
        ("Limits", "; ".join(text for text in (", ".join(rates), str(limits.get("how") or "")) if text)),
        ("Settings", _pairs(document.settings)),
        ("Versions", _pairs(document.versions)),
    ]
    return [[label, str(text)] for label, text in pairs if text]


def _pairs(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in found.items() if value is not None)


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
