"""Dtype rules that every kernel here follows."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

DotPrecision = Literal["ieee", "tf32", "tf32x3"]

_OF_WISH: dict[str | None, DotPrecision] = {None: "ieee", "highest": "ieee", "high": "tf32x3", "default": "tf32"}


def dot_precision(precision: str | None, dtype: Any) -> DotPrecision:
    """`input_precision` of a `tl.dot` whose operands have this dtype.

    float32 without a precision, or with "highest", gets "ieee": full float32 without tensor cores. That is slow, and fine for
    memory-bound kernels. Compute-bound kernels emulate float32 on tensor cores instead (`flash_attention.split_precision`),
    with float32 accuracy at twenty times the speed. "high" is 3xTF32, "default" is one TF32 MMA.

    Args:
        precision: of the call: None, "default", "high" or "highest".
        dtype: of the operands. It only matters for float32; products of narrower types are exact in every mode.
    """
    wished = _OF_WISH[precision]
    return wished if np.dtype(dtype) == np.float32 else "ieee"
