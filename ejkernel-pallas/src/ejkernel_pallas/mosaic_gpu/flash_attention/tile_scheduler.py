"""Tile scheduler: the order in which blocks of queries or keys are processed."""

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
"""L2 cache budget for the arrays that concurrently running blocks share."""
_START = 1
"""Overhead of a block, in tiles."""
_MAX_ASSIGNED = 2**15
"""Largest number of blocks that are assigned one by one; with more, the assignment hardly matters."""


class TileCoordinate(NamedTuple):
    """Tile coordinate: batch, head and block that a program processes, after `iteration` others."""

    batch: Any
    head: Any
    block: Any
    iteration: Any = 0


@dataclasses.dataclass(frozen=True)
class TileScheduler:
    """Attributes:
    blocks, heads, batch: how many there are.
    heads_in_l2: heads, over all batches, that are processed together for L2 reuse.
    reverse: last block first, if it has the most work.
    programs: grid size; with fewer programs than blocks the kernel is persistent.
    assignment: the work of each program `[1 + most + 1, programs]`: its length, then the work indices, then zeros. The kernel
        loads it as an array. None = round-robin, in alternating direction.
    """

    blocks: int
    heads: int
    batch: int
    heads_in_l2: int
    reverse: bool
    programs: int
    assignment: np.ndarray | None = dataclasses.field(default=None, compare=False)

    @property
    def total(self) -> int:
        return self.blocks * self.heads * self.batch

    def coord(self, i_work: Any) -> TileCoordinate:
        """The tile coordinate of a work index. Heads of an L2 group are adjacent, and its blocks follow each other."""
        rows = self.heads * self.batch
        full = jnp.int32(self.heads_in_l2 * self.blocks)
        i_swizzle = lax.div(i_work, full)
        rest = i_work - i_swizzle * full
        start = i_swizzle * self.heads_in_l2
        width = jnp.minimum(jnp.int32(self.heads_in_l2), rows - start)
        i_block = lax.div(rest, width)
        i_row = start + (rest - i_block * width)
        i_block = self.blocks - 1 - i_block if self.reverse else i_block
        i_batch = lax.div(i_row, jnp.int32(self.heads))
        return TileCoordinate(i_batch, i_row - i_batch * self.heads, i_block)

    def loop(self, work: Callable[[TileCoordinate, Any], Any], assignment: Any = None) -> Any:
        """Fold `work(coord, carry)` over the blocks of this program, starting from 0. Returns the last carry."""
        i_program, programs = lax.axis_index("block"), self.programs
        if programs == self.total:
            return work(self.coord(i_program), 0)  # not an array: kernels cannot capture constants
        if self.assignment is None:
            ping_pong_barriers = self.total // programs
            count = ping_pong_barriers + (self._work_at(i_program, jnp.int32(ping_pong_barriers)) < self.total).astype(
                jnp.int32
            )
            return lax.fori_loop(
                0,
                count,
                lambda iteration, carry: work(
                    self.coord(self._work_at(i_program, iteration))._replace(iteration=iteration), carry
                ),
                jnp.int32(0),
            )

        def step(iteration: Any, held: tuple[Any, Any]) -> tuple[Any, Any]:
            carry, i_work = held
            i_next = assignment[iteration + 2, i_program]  # prefetched one block ahead
            return work(self.coord(i_work)._replace(iteration=iteration), carry), i_next

        carry, _ = lax.fori_loop(0, assignment[0, i_program], step, (jnp.int32(0), assignment[1, i_program]))
        return carry

    def _work_at(self, i_program: Any, iteration: Any) -> Any:
        """The work index of a program in an iteration."""
        back = lax.rem(iteration, jnp.int32(2)) == 1
        return iteration * self.programs + jnp.where(back, self.programs - 1 - i_program, i_program)

    def assign(self, lengths: Sequence[int]) -> np.ndarray:
        """Assign blocks in order, each to the program that is free first.

        Args:
            lengths: of each block of a head, in tiles.
        """
        rows, lengths = self.heads * self.batch, lengths[::-1] if self.reverse else lengths
        widths = [min(self.heads_in_l2, rows - start) for start in range(0, rows, self.heads_in_l2)]
        work = np.concatenate([np.repeat(np.asarray(lengths) + _START, width) for width in widths])
        assignment: list[list[int]] = [[] for _ in range(self.programs)]
        free = [(0, i_program) for i_program in range(self.programs)]
        for i_work, length in enumerate(work.tolist()):
            done, i_program = free[0]
            assignment[i_program].append(i_work)
            heapq.heapreplace(free, (done + length, i_program))
        found = np.zeros((max(map(len, assignment)) + 2, self.programs), np.int32)
        for column, share in zip(found.T, assignment, strict=True):
            column[0], column[1 : 1 + len(share)] = len(share), share
        return found


def make_scheduler(
    blocks: int,
    heads: int,
    batch: int,
    *,
    share: int,
    bytes_per_share: int,
    reverse: bool,
    programs: int | None,
    lengths: Sequence[int] | None = None,
) -> TileScheduler:
    """Build the tile scheduler.

    Args:
        blocks, heads, batch: how many there are.
        share: adjacent heads that read the same data.
        bytes_per_share: bytes that they read.
        reverse: the last block first.
        programs: largest grid size; None = one program per block.
        lengths: tiles that each block of a head visits; None = unknown.
    """
    rows = heads * batch
    # At least this many run concurrently in any case.
    least = -(-MULTIPROCESSORS // max(blocks * share, 1))
    most = min(-(-rows // share), max(CACHED_BYTES // max(bytes_per_share, 1), 2 * least))
    # Blocks of an L2 group are scheduled longest first; a last group with few heads would leave long blocks for the tail.
    candidates = [min(rows, share * assignment) for assignment in range(most, min(most, max(least, most // 2)) - 1, -1)]
    heads_in_l2 = max(candidates, key=lambda heads_in_l2: ((rows - 1) % heads_in_l2 + 1) / heads_in_l2)
    total = blocks * rows
    order = TileScheduler(blocks, heads, batch, heads_in_l2, reverse, total if programs is None else min(programs, total))
    if lengths is None or order.programs == total or total > _MAX_ASSIGNED or len(set(lengths)) == 1:
        return order
    return dataclasses.replace(order, assignment=order.assign(lengths))
