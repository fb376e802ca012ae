"""Which config an implementation runs with, and which tier said so."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ejkernel._records import Candidate, resolve
from ejkernel.plugin import ConfigSpace, Phase

if TYPE_CHECKING:
    from ejkernel.operation import Request


@dataclasses.dataclass(frozen=True)
class Selected:
    """A config and the tier that answered."""

    config: Any
    tier: str


def preferred_platform(request: Request, phase: Phase) -> str | None:
    """The platform or implementation id that a loaded tuning table names for this call; None if none does."""
    return None


def select(request: Request, phase: Phase, chosen: Candidate) -> Selected | None:
    """The config for the chosen implementation; None if it has no knobs."""
    reference = chosen.implementation.configs
    if reference is None:
        return None
    space: ConfigSpace = resolve(reference)  # pyright: ignore[reportArgumentType]
    return Selected(space.heuristic(request.call, request.target), "heuristic")
