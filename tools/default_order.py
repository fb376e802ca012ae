"""Where the default order does not choose the fastest, by records of `tests/device/orders.py`, and which order they derive.

    python tools/default_order.py benchmarks/results/orders_grid_h200.json

Losses come first: calls for which another implementation was faster by more than 5 % and a microsecond than what the dispatcher
chooses today among those that were timed. Then, by operation, phase and kind of shape, each implementation's time over the best
one's (geometric mean), fastest first, and how often it was the fastest; `!` where today's choice lost. Of problems that several
records have, the latest counts. `--without cuda` leaves platforms out, as where they are not installed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

import ejkernel
from ejkernel.call.order import default_priority

SCHEMA = "ejkernel-orders-1"
MARGIN, SLACK = 1.05, 0.001
"""Of the best time, and milliseconds."""
HOST_MARGIN, HOST_SLACK = 1.2, 0.003
"""With the host's time, which varies more."""
TARGETS = {"sm_90": "gpu:9.0"}


@dataclasses.dataclass(frozen=True)
class Row:
    """A problem in a phase: what was timed, in milliseconds, and what the dispatcher chooses of it today."""

    operation: str
    function: str
    problem: str
    kind: str
    phase: str
    milliseconds: dict[str, float]
    with_host: dict[str, float]
    chosen: str

    @property
    def name(self) -> str:
        return f"{self.function} {self.problem} {self.phase}"

    @property
    def best(self) -> str:
        return min(self.milliseconds, key=lambda name: self.milliseconds[name])

    @property
    def ratio(self) -> float:
        return self.milliseconds[self.chosen] / self.milliseconds[self.best]

    @property
    def lost(self) -> bool:
        return self.milliseconds[self.chosen] > MARGIN * self.milliseconds[self.best] + SLACK

    @property
    def lost_with_host(self) -> str:
        """What was faster by far as a host sees it, of those that took as long in their kernels; empty if nothing was."""
        if self.lost or self.chosen not in self.with_host:
            return ""
        best = min(self.with_host, key=lambda name: self.with_host[name])
        return best if self.with_host[self.chosen] > HOST_MARGIN * self.with_host[best] + HOST_SLACK else ""


def is_record(content: Any) -> bool:
    return isinstance(content, dict) and content.get("schema") == SCHEMA


def chosen_today(row: dict[str, Any], names: Iterable[str], target: str) -> str:
    """The first of these implementations, as the dispatcher would order them on that target, if it had them."""
    arrays = {name: _shape(written) for name, written in row["arrays"].items()}
    phase = "backward" if row["phase"] == "backward" else "forward"  # the forward decides who forms gradients early
    with ejkernel.use(target=target):
        decision = getattr(ejkernel.explain(row["function"], **arrays, **row["options"]), phase)

    def rank(name: str) -> tuple[int, str]:
        return -default_priority(name, decision.operation, decision.call, phase, decision.target).level, name

    return min(names, key=rank)


def _shape(written: str) -> jax.ShapeDtypeStruct:
    """Of `bfloat16[4,8]`."""
    dtype, _, sizes = written.removesuffix("]").partition("[")
    return jax.ShapeDtypeStruct(tuple(map(int, filter(None, sizes.split(",")))), dtype)


def rows_of(records: Sequence[dict[str, Any]], without: Sequence[str] = ()) -> list[Row]:
    """The latest of each problem and phase on a device, of those for which two implementations were timed."""
    latest: dict[tuple[str, ...], tuple[str, dict[str, Any]]] = {}
    for record in sorted(records, key=lambda one: one["date"]):
        device = record["versions"]["device"]
        target = next((target for word, target in TARGETS.items() if word in device), "gpu:9.0")
        for row in record["times"]:
            latest[device, row["function"], row["problem"], row["phase"]] = (target, row)
    found: list[Row] = []
    for target, row in latest.values():
        times = {name: taken for name, taken in row["milliseconds"].items() if name.partition(".")[0] not in without}
        if len(times) < 2:
            continue
        hosted = {name: taken for name, taken in row.get("with_host", {}).items() if name in times}
        today = chosen_today(row, times, target)
        found.append(Row(row["operation"], row["function"], row["problem"], row["kind"], row["phase"], times, hosted, today))
    return found


def kept_rows(folder: Path, without: Sequence[str] = ()) -> list[Row]:
    """Of the records among a folder's files."""
    contents = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return rows_of([content for content in contents if is_record(content)], without)


def losses(rows: Iterable[Row]) -> list[str]:
    """By operation, what lost and by how much."""
    found: list[str] = []
    for (operation,), group in _grouped(rows, "operation").items():
        lost = sorted((row for row in group if row.lost), key=lambda row: -row.ratio)
        hosted = [row for row in group if row.lost_with_host]
        if lost:
            found.append(f"{operation}: {len(lost)} of {len(group)} calls")
        for row in lost:
            times = f"{row.chosen} {row.milliseconds[row.chosen]:.4f}, {row.best} {row.milliseconds[row.best]:.4f} ms"
            found.append(f"  {row.ratio:5.2f}  {row.name}: {times}")
        for row in hosted:
            other, taken = row.lost_with_host, row.with_host
            times = f"{row.chosen} {taken[row.chosen]:.4f}, {other} {taken[other]:.4f} ms"
            found.append(f"  with the host {taken[row.chosen] / taken[other]:5.2f}  {row.name}: {times}")
    return found


def orders(rows: Iterable[Row]) -> list[str]:
    """By operation, phase and kind of shapes, those with losses first."""
    lines: list[tuple[bool, str]] = []
    for words, group in _grouped(rows, "operation", "phase", "kind").items():
        ratios: dict[str, list[float]] = collections.defaultdict(list)
        for row in group:
            for name, taken in row.milliseconds.items():
                ratios[name].append(taken / row.milliseconds[row.best])
        means = {name: math.exp(sum(map(math.log, values)) / len(values)) for name, values in ratios.items()}
        firsts = collections.Counter(row.best for row in group)
        shown = [
            f"{name} {means[name]:.2f} ({firsts[name]} of {len(ratios[name])})" for name in sorted(means, key=means.__getitem__)
        ]
        chosen = ", ".join(sorted({row.chosen for row in group}))
        lost = any(row.lost for row in group)
        mark = "!" if lost else " "
        lines.append((not lost, f"{mark} {', '.join(filter(None, words))}: {'; '.join(shown)}; chosen: {chosen}"))
    return [line for _, line in sorted(lines, key=lambda one: one[0])]


def _grouped(rows: Iterable[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
    found: dict[tuple[str, ...], list[Row]] = collections.defaultdict(list)
    for row in rows:
        found[tuple(getattr(row, name) for name in names)].append(row)
    return dict(sorted(found.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--without", default="", help="platforms, comma separated")
    options = parser.parse_args()
    contents = [json.loads(path.read_text()) for path in options.records]
    if strangers := [path.name for path, content in zip(options.records, contents, strict=True) if not is_record(content)]:
        parser.error(f"{', '.join(strangers)}: not written by tests/device/orders.py")
    for path, content in zip(options.records, contents, strict=True):
        device, date, count = content["versions"]["device"], content["date"], len(content["times"])
        print(f"{path.name}: {device}, {date}, seed {content['seed']}, {count} calls")
    rows = rows_of(contents, options.without.split(","))
    lost = sum(row.lost for row in rows)
    print(f"\nThe default lost {lost} of {len(rows)} calls", *losses(rows), sep="\n")
    print("\nTimes over the best one's, and how often each was the best", *orders(rows), sep="\n")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
