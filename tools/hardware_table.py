"""Operations by generation of hardware: what was measured, compiled or accepted. `tools/generated_tables.py` writes the tables.

A mark says no more than a record or a kernel's own rule does. Kernels of `ejkernel-cuda` count where they were measured only: what
they take depends on the library beside them, and Triton takes each of their operations too.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from ejkernel.operations import operation_module
from ejkernel.plugin import Implementation, resolve
from ejkernel.targets import Target
from ejkernel.testing.shapes import bound_shapes

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
PLATFORMS = ("triton", "pallas")
HALF = "bfloat16"

MARKS = {
    "measured": ("●", "a kernel passed the conformance suite or was timed on such a device; on a CPU, XLA was timed"),
    "compiled": ("◐", "compiled for it ahead of time, and never run there"),
    "accepted": ("○", "a kernel takes the call by its own rule; no record of compiling or running it there"),
    "xla": ("x", "no kernel of ours: plain JAX, which XLA compiles"),
    "nothing": ("-", "nothing runs it"),
}
"""What a cell says -> its mark and meaning, the strongest first."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """A column.

    Attributes:
        name: its heading.
        target: a device of it.
        capability: as records of Triton's kernels have it.
        kind: as records of kernels for TPU have it.
        devices: words of which one is in a device's name in a record.
    """

    name: str
    target: Target
    capability: int | None = None
    kind: str | None = None
    devices: tuple[str, ...] = ()


GENERATIONS = (
    Generation("Ampere", Target("gpu", "", "8.0"), 80, devices=("A100",)),
    Generation("Ada", Target("gpu", "", "8.9"), 89, devices=("L40", "L4", "4090")),
    Generation("Hopper", Target("gpu", "", "9.0"), 90, devices=("H100", "H200")),
    Generation("Blackwell", Target("gpu", "", "10.0"), 100, devices=("B200", "B300")),
    Generation("Blackwell, consumer", Target("gpu", "", "12.0"), 120, devices=("RTX 50",)),
    Generation("AMD", Target("gpu", "AMD Instinct MI300X", "gfx942"), devices=("MI300",)),
    Generation("TPU v5e", Target("tpu", "TPU v5 lite"), kind="v5e", devices=("TPU v5 lite",)),
    Generation("TPU v5p", Target("tpu", "TPU v5"), kind="v5p", devices=("TPU v5p",)),
    Generation("TPU v6e", Target("tpu", "TPU v6 lite"), kind="v6e", devices=("TPU v6 lite",)),
    Generation("TPU 7x", Target("tpu", "TPU7x"), kind="7x", devices=("TPU7x",)),
    Generation("CPU", Target("cpu", "cpu")),
)


def hardware() -> str:
    """A row for each operation and a column for each generation, in Markdown."""
    lines = [f"| operation | {' | '.join(one.name for one in GENERATIONS)} |", "|---|" + ":---:|" * len(GENERATIONS)]
    for operation in operations():
        cells = (MARKS[standing(operation, generation)][0] for generation in GENERATIONS)
        lines.append(f"| `{operation}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary() -> str:
    """How many operations have which mark on each generation, those of the same numbers in one row, in Markdown."""
    found = {one.name: Counter(standing(operation, one) for operation in operations()) for one in GENERATIONS}
    shown = [mark for mark in MARKS if any(counts[mark] for counts in found.values())]
    rows: dict[tuple[int, ...], list[str]] = {}
    for name, counts in found.items():
        rows.setdefault(tuple(counts[mark] for mark in shown), []).append(name)
    lines = [f"| hardware | {' | '.join(f'{MARKS[mark][0]} {mark}' for mark in shown)} |", "|---|" + "---:|" * len(shown)]
    lines += [f"| {', '.join(names)} | {' | '.join(str(count or '-') for count in counts)} |" for counts, names in rows.items()]
    return "\n".join(lines)


def legend() -> str:
    """What the marks say, in Markdown."""
    return "\n".join(f"- {mark} {word}: {meaning}." for word, (mark, meaning) in MARKS.items() if word != "nothing")


def standing(operation: str, generation: Generation) -> str:
    """The strongest thing that is known of an operation on a generation."""
    if operation in measured_on(generation):
        return "measured"
    if operation in compiled_for(generation):
        return "compiled"
    if accepted(operation, generation):
        return "accepted"
    return "xla" if operation in _implemented("xla") else "nothing"


@functools.cache
def measured_on(generation: Generation) -> frozenset[str]:
    """Operations with a kernel of ours that passed the conformance suite or was timed there; on a CPU, XLA's times."""
    found: set[str] = set()
    for path in RESULTS.glob("conformance_*.json"):
        report = json.loads(path.read_text())
        if report["platform"] != "xla" and any(word in report["device"] for word in generation.devices):
            found |= {name for name, outcome in report["operations"].items() if _passes(outcome)}
    for path in RESULTS.glob("bench_*.json"):
        document = json.loads(path.read_text())
        device = document["device"]
        if device["backend"] == generation.target.backend and (
            device["backend"] == "cpu" or any(word in device["kind"] for word in generation.devices)
        ):
            found |= {
                case["operation"] for case in document["cases"] if any(_counts(run, device["backend"]) for run in case["runs"])
            }
    return frozenset(found)


def _counts(run: dict[str, Any], backend: str) -> bool:
    """Whether it is a time of ours; off a CPU, of a kernel and not of XLA."""
    return run["kind"] == "ours" and run["status"] == "ok" and (backend == "cpu" or run["name"] != "xla")


def _passes(outcome: dict[str, dict[str, dict[str, int]]]) -> bool:
    levels = outcome["levels"].values()
    return sum(level["pass"] for level in levels) > 0 and not sum(level["fail"] for level in levels)


@functools.cache
def compiled_for(generation: Generation) -> frozenset[str]:
    """Operations with a kernel that was compiled for it."""
    if generation.kind is not None:
        rows = json.loads((RESULTS / "tpu_aot.json").read_text())["rows"]
        ours = (row for row in rows if row["kind"] == generation.kind and "peer" not in row)
        return frozenset(row["operation"] for row in ours if "failed" not in row and "refused" not in row)
    rows = json.loads((RESULTS / "triton_aot.json").read_text())["rows"]
    return frozenset(operation for operation, capability, *_ in rows if capability == generation.capability)


@functools.cache
def accepted(operation: str, generation: Generation) -> bool:
    """Whether a kernel takes one of the operation's cases in bfloat16 there."""
    cases = [case for case in operation_module(operation, "cases").CASES if not case.is_benchmark]
    for platform in PLATFORMS:
        for record in _implemented(platform).get(operation, ()):
            if generation.target.backend not in record.backends:
                continue
            supports = resolve(record.supports) if record.supports else None
            if supports is None or any(
                supports(bound_shapes(operation, case, HALF)[1], generation.target) is None for case in cases
            ):
                return True
    return False


def operations() -> list[str]:
    """Operations that anything implements."""
    return sorted(_implemented("xla"))


@functools.cache
def _implemented(platform: str) -> dict[str, list[Implementation]]:
    """Operation -> forward implementations of a platform, from its plugin module."""
    found: dict[str, list[Implementation]] = {}
    for record in importlib.import_module(f"ejkernel_{platform}._plugin").ejkernel_plugin().implementations:
        if record.phase == "forward":
            found.setdefault(record.operation, []).append(record)
    return found
