from __future__ import annotations
import dataclasses
@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    block_k: int
    stages: int
    warpgroups: int
    overlap: bool
    ping_pong: bool
    persistent: bool
