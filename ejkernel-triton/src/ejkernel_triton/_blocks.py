"""Tile sizes, which are powers of two."""

from __future__ import annotations

MIN_DOT_SIZE = 16
"""Smallest M, N and K that `tl.dot` accepts."""


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def dot_block(size: int) -> int:
    """The smallest `tl.dot` block that holds `size` elements."""
    return max(MIN_DOT_SIZE, next_power_of_2(size))
