"""Constants and the tile range that the kernels of both phases share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from ejkernel.targets.nvidia import HOPPER_MULTIPROCESSORS

MULTIPROCESSORS = HOPPER_MULTIPROCESSORS
"""Of an H100 or H200. One block of these kernels fills a multiprocessor."""
ROWS = 64
"""Rows of a consumer: M of one wgmma."""
REGISTERS = {1: (240, 40), 2: (240, 24), 3: (160, 32), 4: (112, 32)}
"""setmaxnreg values of consumers and producer, by the number of consumers."""


@dataclasses.dataclass
class TileRange:
    """Tiles low ... high - 1, of which full_low ... full_high - 1 need no mask, for each of `members` heads, or one split of
    them.

    Attributes:
        low, full_low, full_high, high: bounds in tiles.
        members: heads.
        block: rows of a tile.
        splits: even splits of the steps.
        split: index of this split.
    """

    low: Any
    full_low: Any
    full_high: Any
    high: Any
    members: int
    block: int
    splits: int = 1
    split: Any = 0

    @property
    def count(self) -> Any:
        steps = (self.high - self.low) * self.members
        return steps if self.splits == 1 else jnp.clip(steps - self._start, 0, self._most)

    @property
    def _most(self) -> Any:
        """Steps of a split; the last one may have fewer."""
        return lax.div((self.high - self.low) * self.members + (self.splits - 1), jnp.int32(self.splits))

    @property
    def _start(self) -> Any:
        return self.split * self._most

    def at(self, i_step: Any) -> tuple[Any, Any]:
        """Head and tile of a step."""
        if self.splits > 1:
            i_step = i_step + self._start
        if self.members == 1:
            return 0, self.low + i_step
        width = jnp.maximum(self.high - self.low, 1)
        i_member = lax.div(i_step, width)
        return i_member, self.low + (i_step - i_member * width)

    def whole(self, i_tile: Any) -> Any:
        return (i_tile >= self.full_low) & (i_tile < self.full_high)
