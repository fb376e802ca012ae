"""Where programs run: the `Target` that a program is built for, and what is known of kinds of devices."""

from __future__ import annotations

from ejkernel.targets.target import (
    Target,
    as_target,
    building_for,
    current_target,
    resolve_target,
    target_of_device,
    will_be_lowered,
)

__all__ = ["Target", "as_target", "building_for", "current_target", "resolve_target", "target_of_device", "will_be_lowered"]
