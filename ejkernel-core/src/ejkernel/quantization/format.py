"""The formats: how many bits a code has, how many weights share a scale, and what the scale is."""

from __future__ import annotations

import dataclasses
from typing import Any

from ejkernel.errors import invalid, suggestion, wrong_type

MODES = ("affine", "nf4", "mxfp4", "mxfp8", "nvfp4", "nvfp8")
"""`affine`: integers with a scale and a zero point per group. `nf4`: 16 quantiles of the normal distribution, times a scale.
`mx`: small floats with a power of two per 32. `nv`: small floats with an E4M3 scale per 16."""

WORD = 32
"""Bits of the words that codes are packed into."""

_AFFINE_BITS = (2, 3, 4, 5, 6, 7, 8)
_DEFAULT_GROUP = 64
_FIXED = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16), "nvfp8": (8, 16)}


@dataclasses.dataclass(frozen=True)
class QuantizationFormat:
    """One format.

    Attributes:
        mode: one of `MODES`.
        bits: of a code.
        group_size: weights that share a scale.
    """

    mode: str
    bits: int
    group_size: int

    @property
    def has_zeros(self) -> bool:
        """Whether a group has a zero point."""
        return self.mode == "affine"

    @property
    def float_scales(self) -> bool:
        """Whether scales are floats of the user's dtype; otherwise they are single bytes, E8M0 or E4M3."""
        return self.mode in ("affine", "nf4")

    def words(self, count: int) -> int:
        """Words that hold `count` codes."""
        return -(-count * self.bits // WORD)


def resolve_format(mode: str = "affine", group_size: int | None = None, bits: int | None = None) -> QuantizationFormat:
    """The format that these arguments name; None stands for the mode's default.

    Args:
        mode: one of `MODES`.
        group_size: weights that share a scale. affine and nf4: any, 64 by default; mx: 32; nv: 16.
        bits: of a code. affine: 2 to 8, 4 by default; nf4: 4; the others end in theirs.

    Raises:
        ValueError: the mode is unknown, or does not have this group size or width.
        TypeError: not a string, or not an integer.
    """
    if not isinstance(mode, str):
        raise wrong_type("mode", repr(mode), f"one of {', '.join(MODES)}")
    if mode not in MODES:
        raise invalid("mode", repr(mode), f"one of {', '.join(MODES)}" + suggestion(mode, MODES))
    for name, value in (("group_size", group_size), ("bits", bits)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise wrong_type(name, repr(value), "an int or None")
    if mode in _FIXED:
        own_bits, own_group = _FIXED[mode]
        _same("group_size", group_size, own_group, mode)
        _same("bits", bits, own_bits, mode)
        return QuantizationFormat(mode, own_bits, own_group)
    if mode == "nf4":
        _same("bits", bits, 4, mode)
    elif bits is not None and bits not in _AFFINE_BITS:
        raise invalid("bits", bits, "2 to 8 for mode 'affine'")
    if group_size is not None and group_size < 1:
        raise invalid("group_size", group_size, "a value >= 1")
    return QuantizationFormat(mode, 4 if bits is None else bits, _DEFAULT_GROUP if group_size is None else group_size)


def _same(name: str, got: Any, own: int, mode: str) -> None:
    if got is not None and got != own:
        raise invalid(name, got, f"{own} or None for mode {mode!r}")
