"""Whether seconds of two files may be set against each other, and what else differs between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ejkernel_bench._document import Document

LIMITS_AGREE = 0.15
"""Measured limits of one machine differ this much between runs that have it for themselves."""

BUSY = 0.5
"""Load of a machine that is not quiet."""


def obstacles(old: Document, new: Document) -> list[str]:
    """Why times are not like for like; empty where they are."""
    found = [_differs(name, old.device, new.device) for name in ("backend", "kind", "count")]
    if old.device.get("backend") == new.device.get("backend") == "cpu":
        found.append(_differs("host", old.device, new.device))
    found.append(_differs("clock", old.settings, new.settings))
    found += [
        f"{name}: {before:.3g} before, {after:.3g} now"
        for name, before, after in _rates(old.limits, new.limits)
        if abs(after / before - 1) > LIMITS_AGREE
    ]
    return [text for text in found if text]


def remarks(old: Document, new: Document) -> list[str]:
    """What differs and does not forbid the comparison: it may be what is being compared."""
    loads = (("before", old.device.get("load")), ("now", new.device.get("load")))
    busy = [f"{when}, the machine had other work: load {load}" for when, load in loads if (load or 0) > BUSY]
    settings = [_differs(name, old.settings, new.settings) for name in ("rounds", "input_sets", "size")]
    names = sorted(old.versions.keys() | new.versions.keys())
    return [text for text in (*busy, *settings, *(_differs(name, old.versions, new.versions) for name in names)) if text]


def _differs(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    before, after = old.get(name), new.get(name)
    return f"{name}: {_said(before)} before, {_said(after)} now" if before != after else ""


def _said(value: Any) -> str:
    return "nothing" if value is None else str(value)


def _rates(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Limits that both files hold and that are positive."""
    before, after = _flat(old), _flat(new)
    for name in sorted(before.keys() & after.keys()):
        if before[name] > 0 and after[name] > 0:
            yield name, before[name], after[name]


def _flat(limits: Mapping[str, Any]) -> dict[str, float]:
    rates = {f"largest rate of products in {dtype}": float(rate) for dtype, rate in (limits.get("flops_per_s") or {}).items()}
    return {**rates, "largest bandwidth": float(limits.get("bytes_per_s") or 0)}
