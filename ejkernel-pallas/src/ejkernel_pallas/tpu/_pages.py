"""How the pages of a cache lie in memory. Needs no JAX."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

STORED = ("float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
ITEMSIZE = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclasses.dataclass(frozen=True)
class Pages:
    """One array of pages, as `[1|b, ...]` in a layout of the operation.

    Attributes:
        layout: its name.
        shape: of the array.
        pages, size: how many there are, and the tokens of one.
        rows: heads of a token, those that are padding and, where one array holds both, those of values included.
        width: channels of such a head.
    """

    layout: str
    shape: tuple[int, ...]

    @property
    def token_major(self) -> bool:
        """Whether all heads of a token lie together; if not, all tokens of a head do."""
        return self.layout not in ("phtd", "hptd")

    @property
    def tail(self) -> tuple[int, ...]:
        """The axes of one token, where its heads lie together."""
        return self.shape[3:]

    @property
    def pages(self) -> int:
        return self.shape[2 if self.layout == "hptd" else 1]

    @property
    def size(self) -> int:
        return self.shape[2 if self.token_major else 3]

    @property
    def rows(self) -> int:
        if self.token_major:
            return math.prod(self.tail[:-1])
        return self.shape[1 if self.layout == "hptd" else 2]

    @property
    def width(self) -> int:
        return self.shape[-1]

    @property
    def block(self) -> tuple[int, ...]:
        """Axes of one page when it is read."""
        return (self.size, *self.tail) if self.token_major else (self.rows, self.size, self.width)

    def at(self, member: object, page: object) -> tuple[object, ...]:
        """Index of one page."""
        return (member, slice(None), page) if self.layout == "hptd" else (member, page)

    @property
    def key_row(self) -> tuple[int, int, int]:
        """(factor, first row, first channel) of key head h: row `factor * h + first`."""
        return (2, 0, 0) if self.layout in ("interleaved", "packed") else (1, 0, 0)

    @property
    def value_row(self) -> tuple[int, int, int]:
        if self.layout == "side_by_side":
            return 1, 0, self.width // 2
        return (2, 1, 0) if self.layout in ("interleaved", "packed") else (1, 0, 0)


def sources(call: Any) -> tuple[Pages, ...]:
    """Of a call with `layout`, `key_pages` and `value_pages`: key pages, and value pages where they are apart."""
    return tuple(Pages(call.layout, spec.shape) for spec in (call.key_pages, call.value_pages) if spec is not None)


def stored_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes of VMEM of a buffer that is laid out as pages are: where there are few heads, a tile has few rows."""
    *outer, rows, columns = (1, *shape)
    sublanes, packed = 32 // itemsize, 4 // itemsize
    least = max(packed, 1 << (rows - 1).bit_length()) if rows < sublanes else sublanes
    return math.prod(outer) * (-(-rows // least) * least) * (-(-columns // 128) * 128) * itemsize
