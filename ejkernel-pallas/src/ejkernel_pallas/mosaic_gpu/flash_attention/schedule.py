"""The order in which blocks of queries or keys are worked on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ejkernel_pallas.mosaic_gpu.flash_attention.shape import MULTIPROCESSORS

CACHED_BYTES = 24 * 2**20
"""Of arrays that blocks running at one time share through the L2 cache."""


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
    """

    blocks: int
    heads: int
    batch: int
    section: int
    reverse: bool
    programs: int

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

    def loop(self, work: Callable[[Place, Any], Any]) -> Any:
        """Call `work(place, carry)`, which returns the next carry, 0 at first, for every block of this program; the last carry."""
        i_first = lax.axis_index("block")
        if self.programs == self.total:
            return work(self.place(i_first), 0)  # no array: kernels cannot capture constant ones
        count = lax.div(self.total - 1 - i_first, jnp.int32(self.programs)) + 1

        def step(turn: Any, carry: Any) -> Any:
            return work(self.place(i_first + turn * self.programs)._replace(turn=turn), carry)

        return lax.fori_loop(0, count, step, jnp.int32(0))


def schedule_of(
    blocks: int, heads: int, batch: int, *, share: int, bytes_per_share: int, reverse: bool, programs: int | None
) -> Schedule:
    """`share` neighbouring heads read the same `bytes_per_share`; `programs` at most, or as many as blocks."""
    rows = heads * batch
    shares = max(1, CACHED_BYTES // max(bytes_per_share, 1))
    # So many are worked on at one time in any case. In one section their longest blocks come first: none is left for last.
    shares = max(shares, -(-MULTIPROCESSORS // max(blocks * share, 1)))
    section = min(rows, share * shares)
    total = blocks * rows
    return Schedule(blocks, heads, batch, section, reverse, total if programs is None else min(programs, total))
