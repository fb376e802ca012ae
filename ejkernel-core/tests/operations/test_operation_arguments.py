"""What each operation's door refuses, and that the message names argument, got and expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ejkernel.operations import get_operation

X = np.ones((2, 3, 8), np.float32)
Q = np.ones((2, 5, 4, 8), np.float32)
C = np.ones((5, 4), np.float32)
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
    "rope": [
        ((Q, None, None, C), {}, TypeError, r"cos: got None, expected an array; LlamaRotaryEmbedding"),
        ((Q[0], None, C, C), {}, ValueError, r"query: got shape \(5, 4, 8\) with 3 axes, expected 4 axes"),
        ((Q, Q[:, :4], C, C), {}, ValueError, r"key: got shape \(2, 4, 4, 8\), expected batch 2, length 5 and head size 8"),
        ((Q, Q, C, C[:, :2]), {}, ValueError, r"sin: got 2 channels, expected rotary_dim = 8, or half of it"),
        ((Q, Q, C, np.tile(C, 2)), {}, ValueError, r"sin: got float32\[1,5,8\], expected float32\[1,5,4\] as cos"),
        ((Q, Q, C[:4], C), {}, ValueError, r"cos: got shape \(4, 4\), expected \[5, w\], \[1, 5, w\] or \[2, 5, w\]"),
        ((Q, Q, C, C), {"rotary_dim": 16}, ValueError, "rotary_dim: got 16, expected an even number of channels, at most 8"),
        ((Q, Q, C, C), {"rotary_dim": 3}, ValueError, "rotary_dim: got 3, expected an even number"),
        ((Q, Q, C, C), {"rotary_dim": 2}, ValueError, "cos: got 4 channels, expected rotary_dim = 2, or half of it"),
        ((Q, Q, C, C), {"layout": "THD"}, ValueError, "layout: got 'THD', expected 'BTHD' or 'BHTD'"),
        ((Q, Q, C, C), {"interleaved": 1}, TypeError, "interleaved: got 1, expected a bool"),
    ],
    "softmax": [
        ((X.astype(np.int32),), {}, TypeError, "x: got dtype int32, expected a floating type"),
        ((X[0, 0, 0],), {}, ValueError, r"x: got shape \(\), expected at least one axis"),
        ((X,), {"axis": -4}, ValueError, r"axis: got -4, expected a value in \[-3, 2\]"),
        ((X,), {"axis": (1, -2)}, ValueError, r"axis: got \(1, -2\), expected one or more axes, each once"),
        ((X,), {"axis": ()}, ValueError, r"axis: got \(\), expected one or more axes"),
        ((X, X), {}, TypeError, "where: got dtype float32, expected bool; True marks"),
        ((X, X[:, :2] > 0), {}, ValueError, r"where: got shape \(2, 2, 8\), expected a shape that broadcasts to \(2, 3, 8\)"),
        ((X, X[None] > 0), {}, ValueError, r"where: got shape \(1, 2, 3, 8\), expected a shape that broadcasts"),
        ((X,), {"scale": float("inf")}, ValueError, "scale: got inf, expected a finite number"),
    ],
}


@pytest.mark.parametrize(
    ("name", "args", "options", "error", "message"),
    [(name, *row) for name, rows in REFUSED.items() for row in rows],
)
def test_refused(name: str, args: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        get_operation(name).canonicalise(*args, **options)
