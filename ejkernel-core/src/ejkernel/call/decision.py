"""What the dispatcher decided and why: the same object that it acts on."""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from typing import Any

from ejkernel._notebook import table
from ejkernel._plugins.records import Candidate
from ejkernel.call.order import measured_in
from ejkernel.plugin import Phase
from ejkernel.targets import Target

_SHOWN, _WIDTH = 2, 120
"""Of a summary: how many candidates that do not run, and with how much of their reasons."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One candidate and what became of it.

    Attributes:
        candidate: the implementation and who brings it.
        verdict: `chosen`, `available`, `refused`, `forbidden`, `opt-in`, `not asked for` or `broken`.
        reasons: every reason that applies; of one that could run, why its priority is lower than at best.
        rank: where it stands in the order of preference; smaller is tried first.
    """

    candidate: Candidate
    verdict: str
    reasons: tuple[str, ...] = ()
    rank: tuple[Any, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "implementation": self.candidate.id,
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "distribution": self.candidate.distribution,
            "version": self.candidate.version,
        }


@dataclasses.dataclass(frozen=True)
class Decision:
    """One phase of one call.

    Attributes:
        operation: its name.
        phase: forward or backward.
        call: the canonical call.
        target: where it will run.
        verdicts: every candidate, best first.
        chosen: the one that runs, or None.
        setting: which setting decided: `argument`, `use`, `environment`, `tuning table`, `priority`.
        config: the performance knobs it runs with; None where it has none.
        tier: which tier of config selection answered.
        quarantined: configs that a tier would have chosen and that must not run here, as `<config>: <reason>`.
        absent: plugins that are installed and not usable, as `(name, state, reason)`.
    """

    operation: str
    phase: Phase
    call: Any
    target: Target
    verdicts: tuple[Verdict, ...]
    chosen: Candidate | None
    setting: str
    config: Any = None
    tier: str = ""
    quarantined: tuple[str, ...] = ()
    absent: tuple[tuple[str, str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "operation": self.operation,
            "phase": self.phase,
            "target": dataclasses.asdict(self.target),
            "chosen": self.chosen.id if self.chosen else None,
            "setting": self.setting,
            "config": None if self.config is None else dataclasses.asdict(self.config),
            "tier": self.tier or None,
            "quarantined": list(self.quarantined),
            "records": list(self.records),
            "candidates": [verdict.to_dict() for verdict in self.verdicts],
            "absent": [dict(zip(("name", "state", "reason"), row, strict=True)) for row in self.absent],
        }

    @property
    def records(self) -> tuple[str, ...]:
        """Files in benchmarks/results that the default order quotes, where it decided."""
        if self.chosen is None or self.setting != "priority":
            return ()
        return measured_in(self.chosen.id, self.operation, self.target.backend)

    @property
    def outcome(self) -> str:
        """What runs and who decided it, in one line."""
        return "nothing" if self.chosen is None else f"{self.chosen.id} (by {self.setting})"

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Every candidate, and every plugin that is not usable: id, verdict, who brings it, reasons."""
        rows = [(v.candidate.id, v.verdict, _origin(v.candidate), "; ".join(v.reasons)) for v in self.verdicts]
        rows += [(name, state, "", reason) for name, state, reason in self.absent]
        return rows or [("(no candidate)", "", "", "no plugin implements it")]

    def __str__(self) -> str:
        head = f"{self.operation} {self.phase} on {self.target}: {self.outcome}"
        if self.config is not None:
            head += f", config {self.config} from {self.tier}"
        passed_over = [f"  quarantined: {line}" for line in self.quarantined]
        passed_over += [f"  measured in {', '.join(self.records)}"] if self.records else []
        return "\n".join([head, *passed_over, *_aligned(self.rows())])

    def __repr__(self) -> str:
        return f"<Decision: {self.operation} {self.phase} on {self.target}: {self.summary()}>"

    def summary(self) -> str:
        """The outcome, and why nothing that stands before it runs."""
        before = itertools.takewhile(lambda one: one.verdict != "chosen", self.verdicts)
        passed = [f"{one.candidate.id} {one.verdict}: {'; '.join(one.reasons)}" for one in before if one.reasons]
        shown = [textwrap.shorten(line, _WIDTH, placeholder=" ...") for line in passed[:_SHOWN]]
        more = [f"{len(passed) - _SHOWN} more"] if len(passed) > _SHOWN else []
        return self.outcome + "".join(f"; {line}" for line in (*shown, *more))


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Both phases of one call. Prints as a table; `repr` is its summary and `to_dict()` its JSON form."""

    forward: Decision
    backward: Decision

    @property
    def chosen(self) -> str | None:
        """Id of the implementation that runs forward; None if nothing can."""
        return self.forward.chosen.id if self.forward.chosen else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "operation": self.forward.operation,
            "chosen": self.chosen,
            "call": describe_call(self.forward.call),
            "forward": self.forward.to_dict(),
            "backward": self.backward.to_dict(),
        }

    def __str__(self) -> str:
        return f"{self.forward}\n{self.backward}"

    def __repr__(self) -> str:
        phases = [f"\n  {phase.phase}: {phase.summary()}" for phase in (self.forward, self.backward)]
        return f"<Explanation: {self.forward.operation} on {self.forward.target}{''.join(phases)}>"

    def _repr_html_(self) -> str:
        return "".join(
            table(
                f"{phase.operation} {phase.phase} on {phase.target}: {phase.outcome}",
                ("implementation", "verdict", "from", "reasons"),
                phase.rows(),
                strong=[place for place, one in enumerate(phase.verdicts) if one.verdict == "chosen"],
            )
            for phase in (self.forward, self.backward)
        )


def describe_call(call: Any) -> dict[str, Any]:
    """The fields of a canonical call that say something, as strings and plain values."""
    shown: dict[str, Any] = {}
    for field in dataclasses.fields(call):
        value = getattr(call, field.name)
        if field.name != "save_residuals" and value is not None and value is not False:
            shown[field.name] = value if isinstance(value, (bool, int, float)) else str(value)
    return shown


def _origin(candidate: Candidate) -> str:
    return f"{candidate.distribution} {candidate.version}".strip()


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
