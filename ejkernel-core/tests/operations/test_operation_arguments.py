"""What each operation's door refuses, and that the message names argument, got and expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ejkernel.operations import get_operation

X = np.ones((2, 3, 8), np.float32)
EIGHT = np.ones(8, np.float32)

_NORM = [
    ((X, EIGHT[:5]), {}, ValueError, r"scale: got shape \(5,\), expected \(8,\)"),
    ((X, None, X), {}, ValueError, r"offset: got shape \(2, 3, 8\), expected \(8,\)"),
    ((X.astype(np.int32),), {}, TypeError, "x: got dtype int32, expected a floating type"),
    (([1.0],), {}, TypeError, "x: got list, expected an array"),
    ((X,), {"axis": 3}, ValueError, r"axis: got 3, expected a value in \[-3, 2\]"),
    ((X,), {"axis": 1.0}, TypeError, "axis: got 1.0, expected an int"),
    ((X,), {"epsilon": -1e-6}, ValueError, "epsilon: got -1e-06, expected a value >= 0"),
    ((X,), {"epsilon": float("nan")}, ValueError, "epsilon: got nan, expected a finite number"),
    ((X,), {"scale_offset": 1.0}, ValueError, "scale_offset: got 1.0, expected 0 without scale; pass scale"),
    ((X, EIGHT), {"scale_offset": "1"}, TypeError, "scale_offset: got '1', expected a number"),
    ((X[0, 0, 0],), {}, ValueError, "axis: got -1"),
]

REFUSED: dict[str, list[Any]] = {
    "layer_norm": _NORM,
    "rms_norm": _NORM,
}


@pytest.mark.parametrize(
    ("name", "args", "options", "error", "message"),
    [(name, *row) for name, rows in REFUSED.items() for row in rows],
)
def test_refused(name: str, args: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        get_operation(name).canonicalise(*args, **options)
