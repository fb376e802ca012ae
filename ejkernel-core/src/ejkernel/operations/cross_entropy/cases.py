"""Named problems of `cross_entropy`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle


def arrays_of_rows(
    rows: tuple[int, ...],
    vocabulary: int,
    hidden: int | None = None,
    *,
    bias: bool = False,
    transpose: bool = False,
    ignored: float = 0.0,
    elsewhere: float = 0.0,
    magnitude: float = 1.0,
    excluded: float = 0.0,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """A fraction `ignored` of the rows has target -1 and holds NaN; a fraction `elsewhere` has a target past the vocabulary. A
    fraction `excluded` of the entries that are no targets has logits of -inf, with a head by its bias."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        x = (magnitude * rng.standard_normal((*rows, vocabulary if hidden is None else hidden))).astype(np.float32)
        targets = rng.integers(0, vocabulary, rows).astype(np.int32)
        draw = rng.random(rows)
        targets = np.where(draw < ignored, -1, np.where(draw > 1 - elsewhere, vocabulary + 3, targets)).astype(np.int32)
        x[targets == -1] = np.nan
        arrays: dict[str, Any] = {"x": x, "targets": targets}
        if hidden is not None:
            head = rng.standard_normal((hidden, vocabulary)) / hidden**0.5
            arrays["head"] = (head.T if transpose else head).astype(np.float32)
        if bias:
            arrays["head_bias"] = rng.standard_normal(vocabulary).astype(np.float32)
        if excluded:
            out = rng.random(vocabulary if bias else x.shape) < excluded
            arrays["head_bias" if bias else "x"][out & ~_is_target(targets, vocabulary, any_row=bias)] = -np.inf
        return arrays

    return make


def _is_target(targets: Any, vocabulary: int, *, any_row: bool) -> Any:
    """Which entries `[..., V]` are the target of their row, or `[V]` of any."""
    found = np.arange(vocabulary) == targets[..., None]
    return found.reshape(-1, vocabulary).any(0) if any_row else found


_T = frozenset({"transforms"})
_BENCH, _BENCH_CPU = frozenset({"bench"}), frozenset({"bench-cpu"})

CASES = (
    Case("logits", arrays_of_rows((3, 5), 33, ignored=0.3), {"sum_logits": True}, _T),
    Case("logits-soft-cap", arrays_of_rows((4, 6), 20, magnitude=3.0), {"logit_softcap": 2.0}),
    Case("logits-soft-cap-excluded", arrays_of_rows((4, 6), 20, excluded=0.4), {"logit_softcap": 2.0}),
    Case("logits-one-row", arrays_of_rows((), 7)),
    Case("logits-elsewhere", arrays_of_rows((2, 9), 16, elsewhere=0.5)),
    Case("logits-extreme", arrays_of_rows((5,), 40, magnitude=1e4), tags=frozenset({"extreme"})),
    Case("head", arrays_of_rows((3, 5), 33, 8, bias=True, ignored=0.3), {"sum_logits": True}, _T),
    Case("head-transposed", arrays_of_rows((17,), 40, 12, transpose=True, ignored=0.2), {"transpose_head": True}),
    Case("head-square", arrays_of_rows((2, 4), 16, 16), {}),
    Case("head-square-transposed", arrays_of_rows((2, 4), 16, 16, transpose=True), {"transpose_head": True}),
    Case("head-soft-cap", arrays_of_rows((2, 3, 4), 21, 8, bias=True, magnitude=2.0), {"logit_softcap": 1.5}),
    Case("head-soft-cap-excluded", arrays_of_rows((5,), 40, 8, bias=True, excluded=0.4), {"logit_softcap": 1.5}),
    Case("head-elsewhere", arrays_of_rows((11,), 24, 8, elsewhere=0.4, ignored=0.2)),
    Case("head-all-ignored", arrays_of_rows((2, 3), 12, 8, bias=True, ignored=1.1)),
    Case("head-precision", arrays_of_rows((6,), 12, 8), {"precision": "highest"}),
    Case("vocabulary-1", arrays_of_rows((4,), 1, 8)),
    Case("no-rows", arrays_of_rows((0, 3), 12, 8)),
    Case("several-tiles", arrays_of_rows((2, 35), 300, 8, bias=True, ignored=0.2), {"sum_logits": True}),
    Case("bench-logits-8192x128256", arrays_of_rows((8192,), 128256), tags=_BENCH),
    Case("bench-head-8192x4096x128256", arrays_of_rows((8192,), 128256, 4096), tags=_BENCH),
    Case("bench-logits-256x32000", arrays_of_rows((256,), 32000), tags=_BENCH_CPU),
    Case("bench-head-256x256x32000", arrays_of_rows((256,), 32000, 256), tags=_BENCH_CPU),
)

TOGGLES = {
    "head": Toggle("head-square", drop="head"),
    "head_bias": Toggle("head", drop="head_bias"),
    "transpose_head": Toggle("head-square-transposed", {"transpose_head": False}),
    "logit_softcap": Toggle("logits-soft-cap", {"logit_softcap": None}),
    "sum_logits": Toggle("logits", {"sum_logits": False}),
    "precision": Toggle("head-precision", {"precision": "default"}, program=True, dtype="float32"),
}
