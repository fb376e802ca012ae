"""What moves as many bytes as an operation over rows and does nothing else: how fast the memory lets any kernel be at a size."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

ELEMENTS = 4096
"""Of a program: two accesses of 16 bytes for each of 256 threads in two bytes, the fastest of those tried on an H200."""

if importlib.util.find_spec("triton") and importlib.util.find_spec("ejkernel_triton"):
    import triton
    import triton.language as tl

    from ejkernel_triton._jax_triton import call_kernel

    @triton.jit
    def copy_kernel(p_first, p_second, p_out, BLOCK: tl.constexpr, BOTH: tl.constexpr):
        o_block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        b_out = tl.load(p_first + o_block)
        if BOTH:
            b_out += tl.load(p_second + o_block)
        tl.store(p_out + o_block, b_out)


def can_move(arrays: Sequence[Any]) -> bool:
    return "call_kernel" in globals() and all(x.size % ELEMENTS == 0 and x.shape == arrays[0].shape for x in arrays)


def moved(arrays: Sequence[Any]) -> list[Any]:
    """A copy of one array, or the sum of two."""
    first = arrays[0]
    return call_kernel(
        copy_kernel, (first, arrays[-1]), ((first.shape, first.dtype),), grid=first.size // ELEMENTS, num_warps=8, BLOCK=ELEMENTS,
        BOTH=len(arrays) > 1,
    )  # fmt: skip
