"""The one knob of `rms_norm`: how many rows are worked on at a time."""

from __future__ import annotations

import dataclasses
import math

from ejkernel.operations.rms_norm.interface import RmsNormCall
from ejkernel.plugin import ConfigSpace, Target

_BLOCK_ELEMENTS = 1 << 16
"""Elements of a block that stay in a core's cache with their float32 copies."""


@dataclasses.dataclass(frozen=True)
class RowBlocks:
    """Attributes:
    rows: in one block; any number >= 1 is legal for any call.
    """

    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows: got {self.rows}, expected a number >= 1")


def row_count(call: RmsNormCall) -> int:
    """Rows of the call: everything but the normalised axis."""
    return math.prod(call.x.shape[:-1])


def heuristic(call: RmsNormCall, target: Target) -> RowBlocks:
    """The largest power of two that keeps a block in cache, and not much more than there are rows."""
    fitting = max(1, _BLOCK_ELEMENTS // max(1, call.x.shape[-1]))
    return RowBlocks(1 << min(fitting.bit_length() - 1, max(0, row_count(call) - 1).bit_length()))


def search_space(call: RmsNormCall, target: Target) -> tuple[RowBlocks, ...]:
    """Powers of four up to the number of rows, and the heuristic's choice."""
    sizes = {4**power for power in range(8) if power == 0 or 4**power <= row_count(call)}
    return tuple(RowBlocks(rows) for rows in sorted({*sizes, heuristic(call, target).rows}))


CONFIGS = ConfigSpace(config=RowBlocks, heuristic=heuristic, search_space=search_space)
