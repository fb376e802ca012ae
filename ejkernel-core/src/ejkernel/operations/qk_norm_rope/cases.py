"""Named problems of `qk_norm_rope`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle
from ejkernel.operations.common.rotary.cases import rotary_arrays


def _arrays(
    batch: int,
    length: int,
    heads: int,
    width: int,
    *,
    keys: int,
    angles: tuple[int, ...],
    heads_first: bool = False,
    scales: bool = True,
    magnitude: float = 1.0,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    make_heads = rotary_arrays(batch, length, heads, width, keys=keys, angles=angles, heads_first=heads_first)

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        arrays = dict(make_heads(rng))
        for name in ("query", "key"):
            arrays[name] = np.float32(magnitude) * arrays[name]
        if scales:
            for name in ("query_scale", "key_scale"):
                arrays[name] = (1 + 0.5 * rng.standard_normal(width)).astype(np.float32)
        return arrays

    return make


_BENCH = frozenset({"bench"})

CASES = (
    Case("gqa", _arrays(2, 33, 4, 16, keys=2, angles=(2, 33, 8))),
    Case("plain", _arrays(2, 33, 4, 16, keys=2, angles=(33, 8), scales=False)),
    Case("gemma", _arrays(2, 9, 4, 16, keys=2, angles=(9, 8)), {"scale_offset": 1.0}),
    Case("per-channel", _arrays(2, 9, 4, 16, keys=1, angles=(1, 9, 16))),
    Case("interleaved", _arrays(2, 9, 4, 16, keys=2, angles=(2, 9, 8)), {"interleaved": True}),
    Case("interleaved-per-channel", _arrays(2, 9, 4, 16, keys=2, angles=(9, 16)), {"interleaved": True}),
    Case("partial", _arrays(2, 9, 4, 20, keys=2, angles=(2, 9, 8)), {"rotary_dim": 16}),
    Case("partial-per-channel", _arrays(2, 9, 4, 20, keys=2, angles=(2, 9, 8)), {"rotary_dim": 8}),
    Case("partial-interleaved", _arrays(2, 9, 4, 20, keys=1, angles=(9, 3)), {"rotary_dim": 6, "interleaved": True}),
    Case("heads-first", _arrays(2, 5, 6, 16, keys=2, angles=(2, 5, 8), heads_first=True), {"layout": "BHTD"}),
    Case("square", _arrays(2, 6, 6, 16, keys=6, angles=(6, 8))),
    Case("length-1", _arrays(3, 1, 4, 16, keys=2, angles=(3, 1, 8))),
    Case("length-0", _arrays(2, 0, 4, 16, keys=2, angles=(0, 8))),
    Case("no-rotation", _arrays(2, 5, 4, 8, keys=2, angles=(5, 0)), {"rotary_dim": 0}),
    Case("width-2", _arrays(2, 5, 1, 2, keys=1, angles=(5, 1)), {"epsilon": 0.1}),
    Case("odd-pairs", _arrays(1, 7, 3, 26, keys=3, angles=(7, 13))),
    Case("tiny-values", _arrays(2, 5, 4, 16, keys=2, angles=(5, 8), magnitude=1e-3), {"epsilon": 1e-6}),
    Case("large-squares", _arrays(2, 5, 4, 16, keys=2, angles=(5, 8), magnitude=3e19), tags=frozenset({"wide-range"})),
    Case("bench-b4-t8192-h32-k8-d128", _arrays(4, 8192, 32, 128, keys=8, angles=(8192, 64)), tags=_BENCH),
    Case("bench-b1-t2048-h8-k2-d128", _arrays(1, 2048, 8, 128, keys=2, angles=(2048, 64)), tags=frozenset({"bench-cpu"})),
)

TOGGLES = {
    "query_scale": Toggle("gqa", drop="query_scale"),
    "key_scale": Toggle("gqa", drop="key_scale"),
    "epsilon": Toggle("tiny-values", {"epsilon": 1e-3}),
    "scale_offset": Toggle("gemma", {"scale_offset": 0.0}),
    "rotary_dim": Toggle("partial", {"rotary_dim": 8}),
    "interleaved": Toggle("interleaved", {"interleaved": False}),
    "heads_first": Toggle("square", {"layout": "BHTD"}),
}
