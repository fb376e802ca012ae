"""What the suite found, by operation and feature: the source of the support matrix."""

from __future__ import annotations

import collections
import json
import platform as host
from pathlib import Path
from typing import Any

from ejkernel._version import __version__

LEVELS = ("packaging", "contract", "numbers", "transforms")


class Report:
    """Outcomes per operation, level and feature: "pass", "fail", or "refused: reason"."""

    def __init__(self, platform: str) -> None:
        self.platform = platform
        self.outcomes: dict[tuple[str, str, str], str] = {}
        self.errors: dict[str, dict[str, float]] = collections.defaultdict(dict)
        self.stamped: dict[str, int] = collections.Counter()

    def note(self, operation: str, level: str, feature: str, outcome: str) -> None:
        key = (operation, level, feature)
        if self.outcomes.get(key, "pass") == "pass":
            self.outcomes[key] = outcome

    def worst(self, operation: str, dtype: str, error: float) -> None:
        """Keep the largest error in the norm per operation and dtype."""
        known = self.errors[operation]
        known[dtype] = max(error, known.get(dtype, 0.0))

    def ran(self, operation: str) -> None:
        """Count a program in which the platform under test was seen."""
        self.stamped[operation] += 1

    def state(self) -> list[Any]:
        """Everything found so far, as lists of plain values: what a worker process sends to the one that reports."""
        errors = [(operation, dtype, error) for operation, found in self.errors.items() for dtype, error in found.items()]
        return [[(*key, outcome) for key, outcome in self.outcomes.items()], errors, list(self.stamped.items())]

    def merge(self, state: list[Any]) -> None:
        """Take in what another process found."""
        outcomes, errors, stamped = state
        for operation, level, feature, outcome in outcomes:
            self.note(operation, level, feature, outcome)
        for operation, dtype, error in errors:
            self.worst(operation, dtype, error)
        for operation, count in stamped:
            self.stamped[operation] += count

    def rows(self) -> list[tuple[str, str, int, int, int]]:
        """(operation, level, passed, refused, failed)."""
        found: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for (operation, level, _), outcome in self.outcomes.items():
            found[operation, level][outcome.partition(":")[0]] += 1
        return [(op, level, n["pass"], n["refused"], n["fail"]) for (op, level), n in sorted(found.items())]

    def lines(self) -> list[str]:
        """The table that the suite prints last."""
        lines = [f"{'operation':<26}{'level':<13}{'pass':>6}{'refused':>9}{'fail':>6}   worst relative error"]
        for operation, level, passed, refused, failed in self.rows():
            worst = self.errors.get(operation, {}) if level == "numbers" else {}
            shown = ", ".join(f"{dtype} {error:.1e}" for dtype, error in worst.items())
            lines.append(f"{operation:<26}{level:<13}{passed:>6}{refused:>9}{failed:>6}   {shown}".rstrip())
        for (operation, _, feature), outcome in sorted(self.outcomes.items()):
            if outcome.startswith("refused"):
                lines.append(f"  {operation} {feature}: {outcome}")
        return lines

    def unseen_lines(self, operations: list[str]) -> list[str]:
        """Why these operations never ran on the platform under test, and what to do about it."""
        lines: list[str] = []
        for operation in operations:
            refusals = {
                outcome.partition(": ")[2]: None
                for (name, level, _), outcome in self.outcomes.items()
                if (name, level) == (operation, "numbers") and outcome.startswith("refused")
            }
            reason = next(iter(refusals), "no case was run")
            lines.append(f"ejkernel: {self.platform} was never seen running {operation}, so this proves nothing: {reason}")
        lines.append(
            f"ejkernel: run the suite on a device that {self.platform} supports, or under its interpreter: a fixture with"
            " `ejkernel.use(target=...)`"
        )
        return lines

    def to_dict(self) -> dict[str, Any]:
        import jax

        device = jax.devices()[0]
        return {
            "platform": self.platform,
            "device": device.device_kind,
            "backend": device.platform,
            "versions": {"ejkernel": __version__, "jax": jax.__version__, "python": host.python_version()},
            "operations": {
                operation: {
                    "levels": {
                        level: {"pass": passed, "refused": refused, "fail": failed}
                        for name, level, passed, refused, failed in self.rows()
                        if name == operation
                    },
                    "refusals": {
                        feature: outcome.partition(": ")[2]
                        for (name, _, feature), outcome in sorted(self.outcomes.items())
                        if name == operation and outcome.startswith("refused")
                    },
                    "worst_error": self.errors.get(operation, {}),
                    "programs_seen": self.stamped[operation],
                }
                for operation in sorted({name for name, _, _ in self.outcomes if name != "-"})
            },
        }

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=1, sort_keys=True) + "\n")
