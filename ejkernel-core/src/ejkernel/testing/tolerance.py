"""How far a result may be from the reference: the table that core owns, for tests of plugins."""

from __future__ import annotations

from ejkernel.utils.tolerance import FORWARD, GRADIENT, Deviation, Tolerance, deviation, deviation_on_device

__all__ = ["FORWARD", "GRADIENT", "Deviation", "Tolerance", "deviation", "deviation_on_device"]
