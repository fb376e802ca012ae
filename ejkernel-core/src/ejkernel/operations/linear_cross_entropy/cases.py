"""Named problems of `linear_cross_entropy`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle
from ejkernel.operations.cross_entropy.cases import arrays_of_rows


def _weighted(*arguments: Any, **options: Any) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    make = arrays_of_rows(*arguments, **options)

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        made = make(rng)
        return {**made, "weights": rng.random(made["targets"].shape).astype(np.float32)}

    return arrays


_T = frozenset({"transforms"})
_BENCH, _BENCH_CPU = frozenset({"bench"}), frozenset({"bench-cpu"})
_BOTH = {"label_smoothing": 0.2, "z_loss": 0.01}

CASES = (
    Case("plain", arrays_of_rows((5,), 33, 8)),
    Case("weights", _weighted((3, 5), 33, 8, bias=True, ignored=0.3), _BOTH, _T),
    Case("transposed", _weighted((17,), 40, 12, transpose=True, ignored=0.2), {"transpose_head": True, "z_loss": 0.1}),
    Case("square", arrays_of_rows((2, 4), 16, 16)),
    Case("square-transposed", arrays_of_rows((2, 4), 16, 16, transpose=True), {"transpose_head": True}),
    Case("bias", arrays_of_rows((4,), 19, 8, bias=True), {"label_smoothing": 1.0}),
    Case("soft-cap", _weighted((2, 3, 4), 21, 8, bias=True, magnitude=2.0), {"logit_softcap": 1.5, **_BOTH}),
    Case("soft-cap-excluded", _weighted((5,), 40, 8, bias=True, excluded=0.4), {"logit_softcap": 1.5, "z_loss": 0.01}),
    Case("elsewhere", arrays_of_rows((11,), 24, 8, elsewhere=0.4, ignored=0.2), _BOTH),
    Case("all-ignored", _weighted((2, 3), 12, 8, bias=True, ignored=1.1), _BOTH),
    Case("precision", arrays_of_rows((6,), 12, 8), {"precision": "highest"}),
    Case("vocabulary-1", arrays_of_rows((4,), 1, 8)),
    Case("one-row", arrays_of_rows((), 7, 8)),
    Case("no-rows", arrays_of_rows((0, 3), 12, 8)),
    Case("several-tiles", _weighted((2, 35), 300, 8, bias=True, ignored=0.2), _BOTH),
    Case("bench-8192x4096x128256", arrays_of_rows((8192,), 128256, 4096), tags=_BENCH),
    Case("bench-256x256x32000", arrays_of_rows((256,), 32000, 256), tags=_BENCH_CPU),
)

TOGGLES = {
    "head_bias": Toggle("bias", drop="head_bias"),
    "weights": Toggle("weights", drop="weights"),
    "transpose_head": Toggle("square-transposed", {"transpose_head": False}),
    "logit_softcap": Toggle("soft-cap", {"logit_softcap": None}),
    "label_smoothing": Toggle("bias", {"label_smoothing": 0.0}),
    "z_loss": Toggle("weights", {"z_loss": 0.0}),
    "precision": Toggle("precision", {"precision": "default"}, program=True, dtype="float32"),
}
