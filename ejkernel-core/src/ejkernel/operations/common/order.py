"""How far one platform is before another in the default order, and what several orders share.

Orders are data that recorded measurements justify: platform or implementation id -> level, larger is preferred; or, where a
platform is faster for some calls alone, a rule `(call, phase, target) -> Priority`, with a reason where the priority is lower.
XLA is at 0, what was slower below it, and what was not measured below that. All of it was measured on Hopper (H100, H200); other
GPUs take the same order until they are measured. `tests/test_default_order.py` holds every rule against the recorded times;
rules name their records, whose times docs/evidence/default_order.md has.
"""

from __future__ import annotations

from typing import Any

from ejkernel.call.order import UNMEASURED, Priority
from ejkernel.plugin import Phase
from ejkernel.targets import Target
from ejkernel.targets.nvidia import HALVES

__all__ = ["HALVES", "UNMEASURED", "Priority", "forward_on_triton"]

BEHIND_XLA, XLA = -1, 0
BEHIND_TRITON, TRITON, BEHIND_MOSAIC_GPU, AHEAD_OF_TRITON, FIRST, AHEAD_OF_CUDA = 5, 10, 15, 20, 30, 40


def forward_on_triton(call: Any, phase: Phase, target: Target) -> Priority:
    return Priority(TRITON) if phase == "forward" else Priority(UNMEASURED, "its gradients were not timed beside XLA's")
