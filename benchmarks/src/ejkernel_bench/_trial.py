"""One implementation or peer, on its way through the benchmark of one phase of a case."""

from __future__ import annotations

import dataclasses

from ejkernel.tuning.problems import Error
from ejkernel_bench._program import Program


@dataclasses.dataclass
class Trial:
    """What became of one run.

    Attributes:
        name: of the implementation or the peer.
        ours: whether it is one of ours.
        chosen: whether dispatch would pick it.
        config: and where it comes from, for ours.
        status: "ok", "refused", "wrong" or "failed"; the last three have a reason.
    """

    name: str
    ours: bool
    chosen: bool = False
    config: str | None = None
    tier: str | None = None
    status: str = "ok"
    reason: str | None = None
    program: Program | None = None
    errors: dict[str, Error] = dataclasses.field(default_factory=dict)
    wall: list[float] = dataclasses.field(default_factory=list)
    device: list[float] = dataclasses.field(default_factory=list)

    def end(self, status: str, reason: str) -> None:
        """Set aside, with the reason: it has no times."""
        self.status, self.reason, self.program = status, reason, None
        self.wall, self.device = [], []
