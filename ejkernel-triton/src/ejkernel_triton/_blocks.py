"""Sizes of tiles, which are powers of two."""

from __future__ import annotations

MIN_DOT_SIZE = 16
"""Rows, columns and depth of the smallest product of a tensor core."""


def next_power_of_2(size: int) -> int:
    """The smallest power of two that holds so many elements."""
    return 1 << max(size - 1, 0).bit_length()


def dot_block(size: int) -> int:
    """The smallest block of a product that holds so many elements."""
    return max(MIN_DOT_SIZE, next_power_of_2(size))
