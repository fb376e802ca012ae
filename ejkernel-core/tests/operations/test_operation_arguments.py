"""What each operation's door refuses, and that the message names argument, got and expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ejkernel.operations import get_operation

X = np.ones((2, 3, 8), np.float32)
Q = np.ones((2, 5, 4, 8), np.float32)
C = np.ones((5, 4), np.float32)
G2 = np.array([1, 2], np.int32)
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
    ((X[0, 0, 0],), {}, ValueError, r"x: got shape \(\), expected at least one axis"),
]

ROWS = np.ones((2, 3), np.int32)

REFUSED: dict[str, list[Any]] = {
    "cross_entropy": [
        ((X, ROWS[0]), {}, ValueError, r"targets: got shape \(3,\), expected \(2, 3\), one label for each row"),
        ((X, X[..., 0]), {}, TypeError, "targets: got float32, expected integers"),
        ((X.astype(np.int32), ROWS), {}, TypeError, "x: got dtype int32, expected a floating type"),
        ((X[..., :0], ROWS), {}, ValueError, "x: got a vocabulary of 0, expected at least one entry"),
        ((X, ROWS, C), {}, ValueError, r"head: got shape \(5, 4\), expected \[D, V\] with D = 8 as in x"),
        ((X, ROWS, X[0]), {"transpose_head": 1}, TypeError, "transpose_head: got 1, expected a bool"),
        ((X, ROWS, None, EIGHT), {}, ValueError, "head: got None, expected a head beside head_bias"),
        ((X, ROWS, X[0], EIGHT), {"transpose_head": True}, ValueError, r"head_bias: got shape \(8,\), expected \(3,\)"),
        ((X, ROWS), {"logit_softcap": 0.0}, ValueError, "logits_soft_cap: got 0.0, expected a value > 0"),
        ((X, ROWS), {"precision": "best"}, ValueError, "precision: got 'best'"),
    ],
    "kl_divergence": [
        ((X, X[:1]), {}, ValueError, r"teacher: got rows \(1, 3\), expected \(2, 3\) as the student's"),
        ((X, X[..., :7]), {}, ValueError, "teacher: got a vocabulary of 7, expected 8"),
        ((X, X, None, None, ROWS), {}, TypeError, "valid: got dtype int32, expected bool"),
        ((X, X), {"transpose_heads": True}, ValueError, "transpose_heads: got True, expected False without heads"),
        ((X, X), {"direction": "jsd", "beta": 0.0}, ValueError, r"beta: got 0.0, expected a value in \(0, 1\)"),
        ((X, X), {"temperature": float("nan")}, ValueError, "temperature: got nan, expected a finite number"),
        ((X, X, C), {}, ValueError, r"student_head: got shape \(5, 4\), expected \[D, V\] with D = 8 as in student"),
    ],
    "grouped_matmul": [
        ((X[0], X, G2), {}, ValueError, r"rhs: got shape \(2, 3, 8\), expected \[G, K, N\] with K = 8 as in lhs"),
        ((X[0, :, :4], X, G2), {"transpose_rhs": True}, ValueError, r"expected \[G, N, K\] with K = 4 as in lhs"),
        ((X, X, G2), {}, ValueError, r"lhs: got shape \(2, 3, 8\) with 3 axes, expected 2 axes"),
        ((X[0, :, :3], X, G2[:1]), {}, ValueError, "group_sizes: got 1 groups, expected 2 as in rhs"),
        ((X[0, :, :3], X[:1], G2), {}, ValueError, "group_sizes: got 2 groups, expected 1 as in rhs; group_offset="),
        ((X[0, :, :3], X, G2[:1], 0), {}, ValueError, "group_sizes: got 1 groups, expected at least 2 as in rhs"),
        ((X[0, :, :3], X, G2 / 2), {}, TypeError, "group_sizes: got dtype float64, expected integers"),
        ((X[0, :, :3], X, G2, 1.5), {}, TypeError, "group_offset: got dtype float.., expected an integer"),
        ((X[0, :, :3], X, G2, G2), {}, ValueError, r"group_offset: got shape \(2,\), expected a scalar or \[1\]"),
        ((X[0, :, :3], X, G2, None, X[0, :2]), {}, ValueError, r"existing_out: got shape \(2, 8\), expected \(3, 8\)"),
        (
            (X[0, :, :3], X, G2, None, X[0].astype(np.float16)),
            {},
            TypeError,
            "existing_out: got dtype float16, expected float32",
        ),
        ((X[0, :, :3], X, G2), {"preferred_element_type": np.int32}, TypeError, "preferred_element_type: got dtype int32"),
        ((X[0, :, :3], X, G2), {"precision": "best"}, ValueError, "precision: got 'best', expected None or one of default"),
        ((X[0, :, :3], X, G2), {"transpose_rhs": 1}, TypeError, "transpose_rhs: got 1, expected a bool"),
    ],
    "layer_norm": _NORM,
    "rms_norm": _NORM,
    "mean_pooling": [
        ((X[0],), {}, ValueError, r"x: got shape \(3, 8\), expected \[B,T,H,D\] or \[B,T,D\]"),
        ((X.astype(np.int32),), {}, TypeError, "x: got dtype int32, expected a floating type"),
        ((X, np.array([0, 3])), {}, ValueError, "x: got batch 2, expected batch 1 with cu_seqlens; pack"),
        ((X[:1], np.array([0.0, 3.0])), {}, TypeError, "cu_seqlens: got dtype float64, expected integers"),
        ((X[:1], np.array([[0, 3]])), {}, ValueError, r"cu_seqlens: got shape \(1, 2\) with 2 axes, expected 1 axes"),
        ((X[:1], np.array([], np.int32)), {}, ValueError, r"cu_seqlens: got no element, expected \[n \+ 1\]"),
    ],
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


@pytest.mark.parametrize(
    ("name", "arrays", "message"),
    [
        (
            "grouped_matmul",
            {"lhs": X[0], "group_sizes": np.array([-1, 2])},
            r"group_sizes: got \[-1  2\], expected values >= 0",
        ),
        ("grouped_matmul", {"lhs": X[0], "group_sizes": np.array([2, 2])}, "a sum of at most 3 = rows of lhs"),
        ("mean_pooling", {"x": X[:1], "cu_seqlens": np.array([1, 3])}, r"cu_seqlens: got \[1 3\], expected .* from 0"),
        ("mean_pooling", {"x": X[:1], "cu_seqlens": np.array([0, 2, 1])}, "values that do not decrease"),
        ("mean_pooling", {"x": X[:1], "cu_seqlens": np.array([0, 4])}, "at most 3 = length of x"),
    ],
)
def test_refused_values(name: str, arrays: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_operation(name).check_values(arrays)
