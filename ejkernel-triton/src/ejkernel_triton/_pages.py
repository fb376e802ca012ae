"""Where a token of a head lies in pages of any layout, and small pieces of kernels that read or write them."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
from __future__ import annotations

import dataclasses
import math

import triton
import triton.language as tl

from ejkernel.operations._pages import FUSED, PageShape

SEARCH = 1024
"""Requests that a program looks at together."""


@dataclasses.dataclass(frozen=True)
class Strides:
    """Elements from one page, token, head and batch member to the next, and of the first value where keys are beside values."""

    page: int
    token: int
    head: int
    batch: int
    first_value: int = 0

    @classmethod
    def of(cls, shape: tuple[int, ...], layout: str) -> Strides:
        """Read a canonical shape, which has the batch in front; a batch of one is shared by all members."""
        sizes, batch = PageShape.of(shape, layout), math.prod(shape[1:]) if shape[0] > 1 else 0
        heads, size = sizes.heads, sizes.head_size
        if layout in FUSED:
            beside = sizes.head_size
            return cls(sizes.page_size * heads * 2 * size, heads * 2 * size, 2 * size, batch, beside)
        if layout == "pthd":
            return cls(sizes.page_size * heads * size, heads * size, size, batch)
        if layout == "phtd":
            return cls(sizes.page_size * heads * size, size, sizes.page_size * size, batch)
        return cls(sizes.page_size * size, size, sizes.pages * sizes.page_size * size, batch)


@triton.jit
def count_up_to(p_ascending, length, index, BLOCK: tl.constexpr):
    """How many of the ascending values are at most `index`."""
    count = 0
    for i_start in range(0, length, BLOCK):
        o_value = i_start + tl.arange(0, BLOCK)
        b_value = tl.load(p_ascending + o_value, mask=o_value < length, other=2147483647)  # [BLOCK]
        count += tl.sum((b_value <= index).to(tl.int32))
    return count


def search_block(requests: int) -> int:
    return min(SEARCH, triton.next_power_of_2(max(requests, 1)))
