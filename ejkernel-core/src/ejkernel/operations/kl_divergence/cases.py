"""Named problems of `kl_divergence`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle


def _arrays(
    rows: tuple[int, ...],
    vocabulary: int,
    student: int | None = None,
    teacher: int | None = None,
    *,
    transpose: bool = False,
    valid: float | None = None,
    magnitude: float = 1.0,
    hidden_words: int = 0,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """`student` and `teacher` are the widths of hidden states; a fraction `valid` of the rows counts, the others hold NaN; the
    first `hidden_words` entries of the vocabulary are -inf on both sides."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        arrays: dict[str, Any] = {}
        for name, width in (("student", student), ("teacher", teacher)):
            x = magnitude * rng.standard_normal((*rows, vocabulary if width is None else width))
            x[..., :hidden_words] = -np.inf
            arrays[name] = x.astype(np.float32)
            if width is not None:
                head = (rng.standard_normal((width, vocabulary)) * 1.5 / width**0.5).astype(np.float32)
                arrays[f"{name}_head"] = head.T.copy() if transpose else head
        if valid is not None:
            arrays["valid"] = rng.random(rows) < valid
            for name in ("student", "teacher"):
                arrays[name][~arrays["valid"]] = np.nan
        return arrays

    return make


_T = frozenset({"transforms"})
_BENCH, _BENCH_CPU = frozenset({"bench"}), frozenset({"bench-cpu"})

CASES = (
    Case("logits", _arrays((3, 5), 33, valid=0.6), {"temperature": 2.0}, _T),
    Case("logits-reverse", _arrays((4, 5), 20), {"direction": "reverse", "temperature": 0.7}),
    Case("logits-jsd", _arrays((4, 5), 20, valid=0.7), {"direction": "jsd", "beta": 0.3}),
    Case("logits-hidden-words", _arrays((6,), 20, hidden_words=4), {"direction": "reverse"}),
    Case("logits-hidden-words-jsd", _arrays((6,), 20, hidden_words=4), {"direction": "jsd"}),
    Case("logits-one-row", _arrays((), 7)),
    Case("heads", _arrays((3, 5), 33, 8, 12, valid=0.6), {"direction": "reverse"}, _T),
    Case("heads-forward", _arrays((2, 9), 40, 8, 4), {"temperature": 3.0}),
    Case("heads-jsd-transposed", _arrays((7,), 24, 8, 8, transpose=True), {"direction": "jsd", "transpose_heads": True}),
    Case("heads-square", _arrays((2, 4), 12, 12, 12)),
    Case("heads-square-transposed", _arrays((2, 4), 12, 12, 12, transpose=True), {"transpose_heads": True}),
    Case("student-head", _arrays((5,), 16, 8, None)),
    Case("teacher-head", _arrays((5,), 16, None, 8), {"direction": "jsd", "beta": 0.8}),
    Case("precision", _arrays((5,), 16, 8, 8), {"precision": "highest"}),
    Case("none-valid", _arrays((2, 3), 12, 8, 8, valid=0.0)),
    Case("no-rows", _arrays((0, 3), 12, 8, 8)),
    Case("bench-logits-4096x128256", _arrays((4096,), 128256), tags=_BENCH),
    Case("bench-heads-4096x4096x128256", _arrays((4096,), 128256, 4096, 4096), tags=_BENCH),
    Case("bench-logits-128x32000", _arrays((128,), 32000), tags=_BENCH_CPU),
    Case("bench-heads-128x256x32000", _arrays((128,), 32000, 256, 256), tags=_BENCH_CPU),
)

TOGGLES = {
    "student_head": Toggle("heads-square", drop="student_head"),
    "teacher_head": Toggle("heads-square", drop="teacher_head"),
    "valid": Toggle("logits", drop="valid"),
    "direction": Toggle("heads-forward", {"direction": "reverse"}),
    "temperature": Toggle("heads-forward", {"temperature": 1.0}),
    "beta": Toggle("logits-jsd", {"beta": 0.6}),
    "transpose_heads": Toggle("heads-square-transposed", {"transpose_heads": False}),
    "precision": Toggle("precision", {"precision": "default"}, program=True, dtype="float32"),
}
