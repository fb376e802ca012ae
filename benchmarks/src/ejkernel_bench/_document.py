"""A recorded run of benchmarks, as typed and checked values.

Everything that is derived from a measurement (which time counts, which run is ours, which peer is the best, what a rate is)
is decided here once; the page, the plots, the tables and the comparison read it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ejkernel.errors import invalid

SCHEMA = 1
STATUSES = ("ok", "refused", "wrong", "failed")
KINDS = ("ours", "peer")


@dataclass(frozen=True)
class Run:
    """One implementation, or one peer, on one case. Its fields are those of the file."""

    name: str
    kind: str
    status: str = "ok"
    chosen: bool = False
    reason: str | None = None
    implementation: str | None = None
    config: str | None = None
    tier: str | None = None
    error: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    wall_s: Sequence[float] = ()
    device_s: Sequence[float] = ()
    compile_s: float | None = None
    temporary_bytes: int | None = None

    @property
    def ok(self) -> bool:
        """It ran, was right and was timed."""
        return self.status == "ok" and bool(self.samples)

    @property
    def clock(self) -> str:
        """What its time was read from."""
        return "device" if self.device_s else "wall"

    @property
    def samples(self) -> Sequence[float]:
        """Seconds on the device where they were recorded, else on the wall."""
        return self.device_s or self.wall_s

    @property
    def seconds(self) -> float:
        """The median time; NaN where there is none."""
        return median(self.samples) if self.samples else math.nan

    @property
    def largest_error(self) -> float | None:
        """The largest error in the norm over outputs or gradients; infinite where a file holds null, since JSON has no infinity."""
        norms = [math.inf if found.get("norm") is None else float(found["norm"]) for found in self.error.values()]
        return max(norms, default=None)


@dataclass(frozen=True)
class Case:
    """One problem in one dtype and phase, with everything that ran it."""

    operation: str
    case: str
    dtype: str
    phase: str
    call: str
    flops: float
    bytes: float
    limit_s: float
    runs: Sequence[Run]

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What names it within a file."""
        return (self.operation, self.case, self.dtype, self.phase)

    @property
    def label(self) -> str:
        """The key on one line."""
        return " ".join(self.key)

    @property
    def ours(self) -> Run | None:
        """What a user gets: the run that dispatch chose, and none if that one has no time.

        Where what it would choose was left out of the benchmark, the fastest.
        """
        mine = [run for run in self.runs if run.kind == "ours"]
        wanted = [run for run in mine if run.chosen] or mine
        return min((run for run in wanted if run.ok), key=lambda run: run.seconds, default=None)

    @property
    def best_peer(self) -> Run | None:
        """The fastest peer whose numbers were right."""
        return min((run for run in self.runs if run.kind == "peer" and run.ok), key=lambda run: run.seconds, default=None)

    @property
    def ratio(self) -> float | None:
        """Time of the best peer over ours: above 1 is faster. None without either."""
        ours, peer = self.ours, self.best_peer
        return ratio(peer, ours) if ours and peer else None


@dataclass(frozen=True)
class Document:
    """One file."""

    date: str
    commit: str | None
    command: str
    device: Mapping[str, Any]
    versions: Mapping[str, str]
    limits: Mapping[str, Any]
    settings: Mapping[str, Any]
    cases: Sequence[Case]

    @property
    def kind(self) -> str:
        """The device in words; a CPU by its model and cores."""
        name = "host" if self.device.get("backend") == "cpu" else "kind"
        return str(self.device.get(name) or "unknown device")


def run_kinds(cases: Sequence[Case]) -> dict[str, str]:
    """Name -> kind of everything that ran: ours first, what dispatch chooses most often before the rest."""
    runs = [run for case in cases for run in case.runs]
    chosen = Counter(run.name for run in runs if run.chosen)
    kinds = {run.name: run.kind for run in runs}
    return {name: kinds[name] for name in sorted(kinds, key=lambda name: (kinds[name] != "ours", -chosen[name], name))}


def ratio(numerator: Run, denominator: Run) -> float | None:
    """Time of the first over the second, on a clock that both have; None without one."""
    samples = common_samples(numerator, denominator)
    return median(samples[0]) / median(samples[1]) if samples else None


def common_samples(one: Run, other: Run) -> tuple[Sequence[float], Sequence[float]] | None:
    """Samples of both on the same clock: the device's if both have it, else the wall's."""
    if one.device_s and other.device_s:
        return one.device_s, other.device_s
    return (one.wall_s, other.wall_s) if one.wall_s and other.wall_s else None


def read_document(path: str | Path) -> Document:
    """Read a file that `ejkernel bench` wrote.

    Raises:
        ValueError: it is not such a file.
        OSError: it cannot be read.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise invalid(str(path), f"a file that is not JSON ({error})", "what `ejkernel bench --out` wrote") from error
    return parse_document(content, str(path))


def as_document(result: Document | Mapping[str, Any], where: str = "result") -> Document:
    """A recorded run, or the JSON of one, as the former."""
    return result if isinstance(result, Document) else parse_document(result, where)


def parse_document(content: Any, where: str = "document") -> Document:
    """The same from JSON that was read already; `where` names it in errors."""
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        got = f"schema {content.get('schema')!r}" if isinstance(content, dict) else type(content).__name__
        raise invalid(where, got, f"a benchmark result of schema {SCHEMA}", remedy="write it again with `ejkernel bench --out`")
    try:
        return Document(
            date=str(content["date"]),
            commit=content.get("commit"),
            command=str(content.get("command", "")),
            device=content["device"],
            versions=content.get("versions", {}),
            limits=content.get("limits", {}),
            settings=content.get("settings", {}),
            cases=_cases(content["cases"], where),
        )
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise invalid(where, problem, f"a benchmark result of schema {SCHEMA}") from error


def _cases(found: Any, where: str) -> list[Case]:
    cases = [parse_case(case, where) for case in found]
    keys = [case.key for case in cases]
    if repeated := sorted({key for key in keys if keys.count(key) > 1}):
        raise invalid(where, f"{' '.join(repeated[0])} twice", "each case once")
    return cases


def parse_case(found: Mapping[str, Any], where: str = "case") -> Case:
    """One case of a file."""
    operation, case, dtype, phase = (str(found[name]) for name in ("operation", "case", "dtype", "phase"))
    flops, moved, limit = (float(found[name]) for name in ("flops", "bytes", "limit_s"))
    runs = [_run(run, where) for run in found["runs"]]
    if len({run.name for run in runs}) != len(runs):
        names = ", ".join(run.name for run in runs)
        raise invalid(where, f"runs {names} of {operation} {case} {dtype} {phase}", "each name once")
    return Case(operation, case, dtype, phase, describe(found.get("call", "")), flops, moved, limit, runs)


def _run(found: Mapping[str, Any], where: str) -> Run:
    for name, allowed in (("status", STATUSES), ("kind", KINDS)):
        if found[name] not in allowed:
            raise invalid(where, f"{name} {found[name]!r} of {found['name']!r}", f"one of {', '.join(allowed)}")
    return Run(
        name=str(found["name"]),
        kind=found["kind"],
        status=found["status"],
        chosen=bool(found.get("chosen")),
        reason=found.get("reason"),
        implementation=found.get("implementation"),
        config=found.get("config"),
        tier=found.get("tier"),
        error=found.get("error") or {},
        wall_s=tuple(map(float, found.get("wall_s") or ())),
        device_s=tuple(map(float, found.get("device_s") or ())),
        compile_s=found.get("compile_s"),
        temporary_bytes=found.get("temporary_bytes"),
    )


def describe(call: Any) -> str:
    """Shapes and flags on one line."""
    if isinstance(call, Mapping):
        return ", ".join(f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in call.items())
    return str(call)
