"""Arithmetic on sizes."""

from __future__ import annotations

from typing import Any

from ejkernel.utils.checks import integer


def cdiv(a: Any, b: Any) -> Any:
    """`a / b` rounded up, for integers or integer arrays; b positive.

    >>> cdiv(7, 4)
    2
    """
    return -(-a // b)


def next_power_of_2(x: int) -> int:
    """The smallest power of two that is at least x; 1 for x = 0.

    >>> [next_power_of_2(x) for x in (0, 1, 5, 64, 65)]
    [1, 1, 8, 64, 128]
    """
    return 1 << max(integer("x", x, 0) - 1, 0).bit_length()
