"""Numbers as people read them."""

from __future__ import annotations

_STEPS = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (1e-6, "us", 1e6), (0.0, "ns", 1e9))


def seconds_text(seconds: float | None) -> str:
    """Three digits with a unit; empty for None."""
    if seconds is None:
        return ""
    unit, factor = next((unit, factor) for least, unit, factor in _STEPS if seconds >= least)
    return f"{three_digits(seconds * factor)} {unit}"


def three_digits(value: float) -> str:
    """12.3, 123, 1234: never an exponent above 1e-3."""
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
