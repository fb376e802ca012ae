"""Memory layouts of KV pages. Does not import JAX."""

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
        pages, size: number of pages, and tokens per page.
        rows: heads of a token, including padding and, in a fused array, those of values.
        width: channels of such a head.
    """

    layout: str
    shape: tuple[int, ...]

    @property
    def token_major(self) -> bool:
        """Whether the heads of a token are contiguous; otherwise the tokens of a head are."""
        return self.layout not in ("phtd", "hptd")

    @property
    def tail(self) -> tuple[int, ...]:
        """The axes of one token, if its heads are contiguous."""
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
        """Shape of one page in VMEM."""
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
    """The page arrays of a call: key pages, and value pages unless they are fused."""
    return tuple(Pages(call.layout, spec.shape) for spec in (call.key_pages, call.value_pages) if spec is not None)


def stored_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes of VMEM of a buffer in the layout of pages; with few heads, register tiles have fewer rows."""
    *outer, rows, columns = (1, *shape)
    sublanes, packed = 32 // itemsize, 4 // itemsize
    least = max(packed, 1 << (rows - 1).bit_length()) if rows < sublanes else sublanes
    return math.prod(outer) * (-(-rows // least) * least) * (-(-columns // 128) * 128) * itemsize
