"""The default order: which implementation runs first where several can, as `operations/<operation>/order.py` says."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

from ejkernel._plugins.catalog import default_order, operation_module
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


def measured_in(implementation: str, operation: str, backend: str) -> tuple[str, ...]:
    """Files in benchmarks/results that `order.py` quotes for an implementation's place, or for those behind the fallback."""
    order, platform = default_order(operation).get(backend, {}), implementation.partition(".")[0]
    listed = order.get(implementation, order.get(platform))
    if not order or (listed is None and platform != FALLBACK):
        return ()
    try:
        text = listed.__doc__ if callable(listed) else inspect.getsource(operation_module(operation, "order"))
    except OSError:  # without its source
        return ()
    text = (text or "").rpartition("\nORDER" if isinstance(listed, int) else "\0")[2]
    return tuple(dict.fromkeys(re.findall(r"\w+\.json", text)))
