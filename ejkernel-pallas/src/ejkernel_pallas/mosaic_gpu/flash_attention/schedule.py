"""The order in which blocks of queries or keys are worked on."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel_pallas.mosaic_gpu.flash_attention.shape import MULTIPROCESSORS

CACHED_BYTES = 24 * 2**20
"""Of arrays that blocks running at one time share through the L2 cache."""
_START = 1
"""Tiles in whose time a block begins and ends."""
_DEALT = 2**15
"""Blocks that are dealt out one by one at most; of more, each program has so many that it hardly matters which."""


class Place(NamedTuple):
    """Batch, head and block that a program works on, after `turn` others."""

    batch: Any
    head: Any
    block: Any
    turn: Any = 0


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Attributes:
    blocks, heads, batch: how many there are.
    section: heads of all batches that are worked on at one time, for what they share to stay in the cache.
    reverse: the last block first, where it has the most work.
    programs: that run; each walks over its share of the blocks if there are fewer than blocks.
    shares: the work of each program, `[1 + most + 1, programs]`: how much it is, then which, turn by turn, then zeros. The kernel
        reads it as an array. None = work is dealt out in its order, every other round in the other direction.
    """

    blocks: int
    heads: int
    batch: int
    section: int
    reverse: bool
    programs: int
    shares: np.ndarray | None = dataclasses.field(default=None, compare=False)

    @property
    def total(self) -> int:
        return self.blocks * self.heads * self.batch

    def place(self, i_work: Any) -> Place:
        """Heads of a section are neighbours, and its blocks follow each other."""
        rows = self.heads * self.batch
        full = jnp.int32(self.section * self.blocks)
        i_section = lax.div(i_work, full)
        rest = i_work - i_section * full
        start = i_section * self.section
        width = jnp.minimum(jnp.int32(self.section), rows - start)
        i_block = lax.div(rest, width)
        i_row = start + (rest - i_block * width)
        i_block = self.blocks - 1 - i_block if self.reverse else i_block
        i_batch = lax.div(i_row, jnp.int32(self.heads))
        return Place(i_batch, i_row - i_batch * self.heads, i_block)

    def loop(self, work: Callable[[Place, Any], Any], shares: Any = None) -> Any:
        """Call `work(place, carry)`, which returns the next carry, 0 at first, for every block of this program; the last carry."""
        i_program, programs = lax.axis_index("block"), self.programs
        if programs == self.total:
            return work(self.place(i_program), 0)  # no array: kernels cannot capture constant ones
        if self.shares is None:
            turns = self.total // programs
            count = turns + (self._dealt(i_program, jnp.int32(turns)) < self.total).astype(jnp.int32)
            return lax.fori_loop(
                0,
                count,
                lambda turn, carry: work(self.place(self._dealt(i_program, turn))._replace(turn=turn), carry),
                jnp.int32(0),
            )

        def step(turn: Any, held: tuple[Any, Any]) -> tuple[Any, Any]:
            carry, i_work = held
            i_next = shares[turn + 2, i_program]  # asked for a block ahead
            return work(self.place(i_work)._replace(turn=turn), carry), i_next

        carry, _ = lax.fori_loop(0, shares[0, i_program], step, (jnp.int32(0), shares[1, i_program]))
        return carry

    def _dealt(self, i_program: Any, turn: Any) -> Any:
        """The work of a program in a turn."""
        back = lax.rem(turn, jnp.int32(2)) == 1
        return turn * self.programs + jnp.where(back, self.programs - 1 - i_program, i_program)

    def even_shares(self, lengths: Sequence[int]) -> np.ndarray:
        """Shares as programs would take blocks in their order, each when it is done with the one before.

        Args:
            lengths: of each block of a head, in tiles.
        """
        rows, lengths = self.heads * self.batch, lengths[::-1] if self.reverse else lengths
        widths = [min(self.section, rows - start) for start in range(0, rows, self.section)]
        work = np.concatenate([np.repeat(np.asarray(lengths) + _START, width) for width in widths])
        shares: list[list[int]] = [[] for _ in range(self.programs)]
        free = [(0, i_program) for i_program in range(self.programs)]
        for i_work, length in enumerate(work.tolist()):
            done, i_program = free[0]
            shares[i_program].append(i_work)
            heapq.heapreplace(free, (done + length, i_program))
        found = np.zeros((max(map(len, shares)) + 2, self.programs), np.int32)
        for column, share in zip(found.T, shares, strict=True):
            column[0], column[1 : 1 + len(share)] = len(share), share
        return found


def schedule_of(
    blocks: int,
    heads: int,
    batch: int,
    *,
    share: int,
    bytes_per_share: int,
    reverse: bool,
    programs: int | None,
    lengths: Sequence[int] | None = None,
) -> Schedule:
    """The order of the blocks of so many heads.

    Args:
        blocks, heads, batch: how many there are.
        share: neighbouring heads that read the same.
        bytes_per_share: that they read.
        reverse: the last block first.
        programs: that run at most; None = one for each block.
        lengths: tiles that each block of a head visits; None = not known.
    """
    rows = heads * batch
    # So many are worked on at one time in any case.
    least = -(-MULTIPROCESSORS // max(blocks * share, 1))
    most = min(-(-rows // share), max(CACHED_BYTES // max(bytes_per_share, 1), 2 * least))
    # Blocks of a section come the longest first; a last section with few heads would leave many long ones for the end.
    sections = [min(rows, share * shares) for shares in range(most, min(most, max(least, most // 2)) - 1, -1)]
    section = max(sections, key=lambda section: ((rows - 1) % section + 1) / section)
    total = blocks * rows
    order = Schedule(blocks, heads, batch, section, reverse, total if programs is None else min(programs, total))
    if lengths is None or order.programs == total or total > _DEALT or len(set(lengths)) == 1:
        return order
    return dataclasses.replace(order, shares=order.even_shares(lengths))
