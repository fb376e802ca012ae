"""Tables of the trainer's records. `tools/generated_tables.py` writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def training() -> str:
    """Training steps beside plain JAX and the best kernels of others, what we lose first, in Markdown."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("train_*.json"))]
    return "\n".join(training_steps([record for record in found if "protocol" in record]))


def training_in_short() -> str:
    """The same for a narrow page: rates and ratios, and where they come from below."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("train_*.json"))]
    return "\n".join(training_ratios([record for record in found if "protocol" in record]))


def scaling() -> str:
    """Training steps on several devices against one device of the same run, in Markdown."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("train_*.json"))]
    return "\n".join(scaled_steps([record for record in found if "one_device" in record]))


BUILDS = {"ejkernel": "ejkernel", "plain": "plain JAX", "peers": "others' best"}


def training_steps(records: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each record whose builds compute the same; then those whose builds do not, or of which one failed."""
    if not records:
        return ["No run is recorded yet."]
    names = list(BUILDS.values())
    heads = ["model", *(f"tokens/s, {name}" for name in names), *(f"ours / {name}" for name in names[1:])]
    heads += [f"GiB: {' / '.join(names)}", "device, date, commit"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    agreed = [record for record in records if all(build["agreement"]["agrees"] for build in record["builds"])]
    for record in sorted(agreed, key=_least):
        builds, ratios = _builds(record), _training_ratios(record)
        number = f"{record['devices']} x " if record["devices"] > 1 else ""
        cells = [
            _trained(record),
            *(f"{builds[name]['tokens_per_second']:,.0f}" if name in builds else "failed" for name in BUILDS),
            *(f"{ratios[name]:.2f}" if name in ratios else "-" for name in ("plain", "peers")),
            " / ".join(f"{builds[name]['program_bytes'] / 2**30:.1f}" if name in builds else "-" for name in BUILDS),
            f"{number}{record['device']}, {record['date'][:10]}, {(record.get('commit') or 'unknown')[:10]}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    remarks = [
        f"- {_trained(one)}: builds differ by more than rounding, so it is left out" for one in records if one not in agreed
    ]
    remarks += [f"- {_trained(one)}: {BUILDS[build['kernels']]} failed" for one in records for build in one["failed"]]
    return [*lines, *(["", *remarks] if remarks else [])]


def training_ratios(records: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each record whose builds compute the same: what we lose first, then the devices and days."""
    lines = ["| model | tokens/s | / plain JAX | / others' best |", "|---|---:|---:|---:|"]
    agreed = [record for record in records if all(build["agreement"]["agrees"] for build in record["builds"])]
    for record in sorted(agreed, key=_least):
        ratios, ours = _training_ratios(record), _builds(record)["ejkernel"]["tokens_per_second"]
        cells = [f"{ratios[name]:.2f}" if name in ratios else "-" for name in ("plain", "peers")]
        lines.append(f"| {_trained(record)} | {ours:,.0f} | {' | '.join(cells)} |")
    where = sorted({f"{record['device']}, {record['date'][:10]}" for record in agreed})
    return [*lines, "", f"Measured on {'; '.join(where)}."] if agreed else ["No run is recorded yet."]


def scaled_steps(records: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each record of several devices: each build over its own rate on one, times their number."""
    if not records:
        return ["No run is recorded yet."]
    lines = [f"| model | {' | '.join(f'{name}, of N times one device' for name in BUILDS.values())} |", "|---|---|---|---|"]
    for record in records:
        builds, one = _builds(record), record["one_device"]
        shares = [
            f"{builds[name]['tokens_per_second'] / one[name] / record['devices']:.2f}"
            if name in builds and name in one
            else "-"
            for name in BUILDS
        ]
        lines.append(f"| {_trained(record)} | {' | '.join(shares)} |")
    return lines


def _builds(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {build["kernels"]: build for build in record["builds"] if not build["plain"]}


def _training_ratios(record: dict[str, Any]) -> dict[str, float]:
    """Our tokens per second over each of the others'."""
    rates = {name: build["tokens_per_second"] for name, build in _builds(record).items()}
    return {name: rates["ejkernel"] / rate for name, rate in rates.items() if name != "ejkernel" and "ejkernel" in rates}


def _least(record: dict[str, Any]) -> float:
    return min(_training_ratios(record).values(), default=0.0)


def _trained(record: dict[str, Any]) -> str:
    config = record["config"]
    remat = f"remat {config['remat']}" if config["remat"] != "none" else ""
    parts = [f"{config['model']} {config['size']}", "float8" if config["float8"] else "", config["mesh"], remat]
    return ", ".join([*(part for part in parts if part), f"{config['batch']} x {config['length']}"])
