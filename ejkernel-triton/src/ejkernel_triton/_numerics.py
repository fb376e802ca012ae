"""Dtype rules that every kernel here follows."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

DotPrecision = Literal["ieee", "tf32", "tf32x3"]

_OF_WISH: dict[str | None, DotPrecision] = {None: "ieee", "highest": "ieee", "high": "tf32x3", "default": "tf32"}


def dot_precision(precision: str | None, dtype: Any) -> DotPrecision:
    """`input_precision` of a `tl.dot` whose operands have this dtype: without a wish, float32 is not rounded on the way.

    Args:
        precision: of the call: None, "default", "high" or "highest".
        dtype: of the operands. Only float32 has a choice; products of narrower types are exact in every form.
    """
    wished = _OF_WISH[precision]
    return wished if np.dtype(dtype) == np.float32 else "ieee"
