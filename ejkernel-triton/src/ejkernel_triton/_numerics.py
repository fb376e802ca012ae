"""Dtype rules that every kernel here follows."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

DotPrecision = Literal["ieee", "tf32", "tf32x3"]

_OF_WISH: dict[str | None, DotPrecision] = {None: "ieee", "highest": "ieee", "high": "tf32x3", "default": "tf32"}


def dot_precision(precision: str | None, dtype: Any) -> DotPrecision:
    """`input_precision` of a `tl.dot` whose operands have this dtype.

    float32 without a wish, and "highest", means products as good as float32's own. "ieee" is that without tensor cores, which is
    slow, and right for a kernel that waits for memory or multiplies little. A kernel whose time is float32 products makes them of
    bfloat16 parts on tensor cores in its place, as `flash_attention.parts` does: float32 errors, twenty times as fast.
    "high" is three products of TF32 parts, "default" one product of numbers rounded to TF32.

    Args:
        precision: of the call: None, "default", "high" or "highest".
        dtype: of the operands. Only float32 has a choice; products of narrower types are exact in every form.
    """
    wished = _OF_WISH[precision]
    return wished if np.dtype(dtype) == np.float32 else "ieee"
