"""One tuned config with its evidence, and the JSON that caches, tables and autotuning results all share."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ejkernel.configs.key import Key
from ejkernel.errors import invalid

FORMAT = "ejkernel tuned configs"
LEVEL = 1
"""Level of the JSON; files of another level are not read."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """One config that was tried: seconds per run, or why it did not run."""

    config: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    seconds: tuple[float, ...] = ()
    failure: str = ""

    @property
    def median(self) -> float:
        """Of the runs; infinite for one that did not run."""
        return float(np.median(self.seconds)) if self.seconds and not self.failure else math.inf


@dataclasses.dataclass(frozen=True)
class Check:
    """The comparison of a config's results with the reference: largest error, in units of what is tolerated there."""

    passed: bool
    error: float
    reference: str = "NumPy float64"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tuned config and how it is known to be right and fast.

    Attributes:
        key: what it belongs to.
        config: its knobs by name; None for an implementation without knobs.
        best: id of the implementation that was fastest for this call when it was tuned; empty if others were not timed.
        tier: what found it, e.g. `"autotune"`.
        timings: everything that was tried, not only the winner.
        check: comparison with the reference; an entry without one that passed is neither stored nor used.
        provenance: when, on what, by which versions; for people only.
    """

    key: Key
    config: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    best: str = ""
    tier: str = "autotune"
    timings: tuple[Timing, ...] = dataclasses.field(default=(), hash=False)
    check: Check | None = None
    provenance: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def verified(self) -> bool:
        """Whether its results matched the reference."""
        return self.check is not None and self.check.passed

    @property
    def seconds(self) -> float:
        """Median of the fastest config; infinite without timings."""
        return min((timing.median for timing in self.timings), default=math.inf)

    @property
    def gain(self) -> float:
        """Time of the heuristic's config, which is tried first, over that of this one; NaN where it was not right."""
        medians = [timing.median for timing in self.timings if timing.config == self.config]
        return self.timings[0].median / medians[0] if medians and not self.timings[0].failure else math.nan

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        plain = {name: getattr(self, name) for name in ("config", "best", "tier")}
        timings = [
            {"config": t.config, "seconds": [float(value) for value in t.seconds], "failure": t.failure} for t in self.timings
        ]
        check = self.check and {
            "passed": bool(self.check.passed),
            "error": float(self.check.error),
            "reference": self.check.reference,
        }
        return {"key": self.key.to_dict(), **plain, "timings": timings, "check": check, "provenance": dict(self.provenance)}

    @classmethod
    def from_dict(cls, values: Any) -> Entry:
        """Read what `to_dict` wrote.

        Raises:
            ValueError: it is something else; the message says what.
        """
        try:
            return cls(
                Key.from_dict(values["key"]),
                _knob_values(values["config"]),
                _typed(values["best"], str),
                _typed(values["tier"], str),
                tuple(_timing(timing) for timing in _typed(values["timings"], list)),
                None if values["check"] is None else _check(values["check"]),
                dict(_typed(values["provenance"], dict)),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a tuned config: {type(error).__name__}: {error}") from error


def require_verified(entry: Entry) -> None:
    """Refuse an entry whose config is not known to give right results."""
    if not entry.verified:
        found = "no check" if entry.check is None else f"a failed check (error {entry.check.error:g} of what is tolerated)"
        name = f"{entry.key.operation}/{entry.key.implementation}:{entry.key.phase}"
        raise invalid("entry", f"{found} for {name}", "a check against the reference that passed")


def dump_entries(entries: Iterable[Entry]) -> str:
    """Entries as one JSON text."""
    document = {"format": FORMAT, "level": LEVEL, "entries": [entry.to_dict() for entry in entries]}
    return json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n"


def load_entries(text: str) -> tuple[Entry, ...]:
    """Read what `dump_entries` wrote.

    Raises:
        ValueError: it is something else, of another level, or has an entry without a passed check.
    """
    try:
        document = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"not {FORMAT!r}")
    if document.get("level") != LEVEL:
        raise ValueError(f"level {document.get('level')!r}; this version of ejkernel reads level {LEVEL}")
    if not isinstance(document.get("entries"), list):
        raise ValueError("no list of entries")
    entries = tuple(map(Entry.from_dict, document["entries"]))
    for entry in entries:
        require_verified(entry)
    return entries


def _typed(value: Any, expected: type) -> Any:
    if type(value) is not expected:
        raise TypeError(f"{value!r} in place of {expected.__name__}")
    return value


def _knob_values(values: Any) -> dict[str, Any] | None:
    return None if values is None else _typed(values, dict)


def _timing(values: Any) -> Timing:
    seconds = tuple(_typed(value, float) for value in _typed(values["seconds"], list))
    return Timing(_knob_values(values["config"]), seconds, _typed(values["failure"], str))


def _check(values: Any) -> Check:
    return Check(_typed(values["passed"], bool), _typed(values["error"], float), _typed(values["reference"], str))
