"""Rows of any leading axes as one or several matrices, and back.

JAX refuses to merge axes of which one is split over an explicit mesh, so up to two leading axes are left as they are.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["matrices", "rows_as_given"]


def matrices(array: Any, last: int) -> Any:
    """`[..., *last axes]` as `[b, m, *last axes]`."""
    lead = array.ndim - last
    if lead > 2:
        return array.reshape(math.prod(array.shape[: lead - 1]), *array.shape[lead - 1 :])
    return array[(None,) * (2 - lead)]


def rows_as_given(out: Any, rows: tuple[int, ...]) -> Any:
    """`[b, m, n]` as `[*rows, n]`."""
    if len(rows) < 2:
        return out[0] if rows else out[0, 0]
    return out if len(rows) == 2 else out.reshape(*rows, out.shape[2])
