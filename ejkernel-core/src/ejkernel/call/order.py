"""The default order: which implementation runs first where several can, as `operations/<operation>/order.py` says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ejkernel._plugins.catalog import default_order
from ejkernel.call.arrays import with_known_sizes
from ejkernel.plugin import FALLBACK, Phase
from ejkernel.targets import Target

UNMEASURED = -2


@dataclasses.dataclass(frozen=True)
class Priority:
    """Where an implementation stands for one call; `reason` says why that is lower than it stands at best."""

    level: int
    reason: str = ""


Rule = Callable[[Any, Phase, Target], Priority]
"""`(call, phase, target) -> Priority`."""


def default_priority(implementation: str, operation: str, call: Any, phase: Phase, target: Target) -> Priority:
    """Where an implementation, named by its id, stands for one phase of a call.

    What is listed for its platform holds for each of its implementations. Unlisted, the platform that runs everywhere stands at 0
    and every other below it, until it is measured.
    """
    order = default_order(operation).get(target.backend, {})
    platform = implementation.partition(".")[0]
    listed = order.get(implementation, order.get(platform, 0 if platform == FALLBACK else UNMEASURED))
    return Priority(listed) if isinstance(listed, int) else listed(with_known_sizes(call), phase, target)
