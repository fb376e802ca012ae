"""Config selection in seven tiers: override, overlay, memory, persistent, autotune, heuristic, error."""

from __future__ import annotations

from ejkernel.tuning._select import Selected, preferred_platform, select

__all__ = ["Selected", "preferred_platform", "select"]
