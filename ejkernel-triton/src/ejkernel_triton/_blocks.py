"""Sizes of tiles, which are powers of two."""

from __future__ import annotations

SMALLEST_PRODUCT = 16
"""Rows, columns and depth of the smallest product of a tensor core."""


def power_of_two(size: int) -> int:
    """The smallest power of two that holds so many elements."""
    return 1 << max(size - 1, 0).bit_length()


def product_block(size: int) -> int:
    """The smallest block of a product that holds so many elements."""
    return max(SMALLEST_PRODUCT, power_of_two(size))
