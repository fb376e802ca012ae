"""Named problems of `rope`."""

from __future__ import annotations

from ejkernel.call.case import Case, Toggle
from ejkernel.operations.common.rotary.cases import rotary_arrays

_BENCH = frozenset({"bench"})

CASES = (
    Case("query-alone", rotary_arrays(2, 33, 3, 16, angles=(33, 8))),
    Case("gqa", rotary_arrays(2, 33, 4, 16, keys=2, angles=(2, 33, 8))),
    Case("per-channel", rotary_arrays(2, 9, 4, 16, keys=1, angles=(1, 9, 16))),
    Case("interleaved", rotary_arrays(2, 9, 4, 16, keys=2, angles=(2, 9, 8)), {"interleaved": True}),
    Case("interleaved-per-channel", rotary_arrays(2, 9, 4, 16, keys=2, angles=(9, 16)), {"interleaved": True}),
    Case("partial", rotary_arrays(2, 9, 4, 20, keys=2, angles=(2, 9, 8)), {"rotary_dim": 16}),
    Case("partial-per-channel", rotary_arrays(2, 9, 4, 20, keys=2, angles=(2, 9, 8)), {"rotary_dim": 8}),
    Case("partial-interleaved", rotary_arrays(2, 9, 4, 20, angles=(9, 3)), {"rotary_dim": 6, "interleaved": True}),
    Case("heads-first", rotary_arrays(2, 5, 6, 16, keys=2, angles=(2, 5, 8), heads_first=True), {"layout": "BHTD"}),
    Case("square", rotary_arrays(2, 6, 6, 16, keys=6, angles=(6, 8))),
    Case("length-1", rotary_arrays(3, 1, 4, 16, keys=2, angles=(3, 1, 8))),
    Case("length-0", rotary_arrays(2, 0, 4, 16, keys=2, angles=(0, 8))),
    Case("no-rotation", rotary_arrays(2, 5, 4, 8, angles=(5, 0)), {"rotary_dim": 0}),
    Case("width-2", rotary_arrays(2, 5, 1, 2, keys=1, angles=(5, 1))),
    Case("odd-pairs", rotary_arrays(1, 7, 3, 26, keys=3, angles=(7, 13))),
    Case("bench-b4-t8192-h32-k8-d128", rotary_arrays(4, 8192, 32, 128, keys=8, angles=(8192, 64)), tags=_BENCH),
    Case("bench-b1-t2048-h8-k2-d128", rotary_arrays(1, 2048, 8, 128, keys=2, angles=(2048, 64)), tags=frozenset({"bench-cpu"})),
)

TOGGLES = {
    "key": Toggle("gqa", drop="key"),
    "rotary_dim": Toggle("partial", {"rotary_dim": 8}),
    "interleaved": Toggle("interleaved", {"interleaved": False}),
    "heads_first": Toggle("square", {"layout": "BHTD"}),
}
