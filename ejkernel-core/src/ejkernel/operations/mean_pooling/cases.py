"""Named problems of `mean_pooling`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle


def _arrays(
    *shape: int, bounds: tuple[int, ...] | None = None, poison: bool = True
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """`bounds` are cumulative lengths; tokens past the last one hold NaN if `poison`."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        x = rng.standard_normal(shape).astype(np.float32)
        if bounds is None:
            return {"x": x}
        if poison:
            (x[0] if shape[0] == 1 else x)[bounds[-1] :] = np.nan
        return {"x": x, "cu_seqlens": np.array(bounds, np.int32)}

    return make


_BENCH = frozenset({"bench"})

CASES = (
    Case("heads", _arrays(2, 33, 3, 16)),
    Case("no-heads", _arrays(2, 33, 16)),
    Case("packed", _arrays(1, 33, 3, 16, bounds=(0, 5, 6, 33))),
    Case("packed-no-heads", _arrays(1, 33, 16, bounds=(0, 20, 33))),
    Case("packed-without-batch", _arrays(33, 3, 16, bounds=(0, 5, 6, 30))),
    Case("packed-rows", _arrays(33, 16, bounds=(0, 5, 6, 30))),
    Case("packed-empty-sequences", _arrays(1, 12, 2, 8, bounds=(0, 0, 5, 5, 5, 12, 12))),
    Case("packed-unused-tail", _arrays(1, 12, 2, 8, bounds=(0, 4, 7))),
    Case("packed-one-sequence", _arrays(1, 12, 2, 8, bounds=(0, 12))),
    Case("packed-one-short-sequence", _arrays(1, 12, 2, 8, bounds=(0, 7), poison=False)),
    Case("packed-no-sequence", _arrays(1, 12, 2, 8, bounds=(0,))),
    Case("packed-length-0", _arrays(1, 0, 2, 8, bounds=(0, 0, 0))),
    Case("packed-long", _arrays(1, 3000, 1, 4, bounds=(0, 1, 1500, 2999, 3000))),
    Case("length-1", _arrays(2, 1, 3, 16)),
    Case("length-0", _arrays(2, 0, 3, 16)),
    Case("no-batch", _arrays(0, 4, 16)),
    Case("bench-b8-t8192-h32-d128", _arrays(8, 8192, 32, 128), tags=_BENCH),
    Case("bench-b2-t2048-h8-d128", _arrays(2, 2048, 8, 128), tags=frozenset({"bench-cpu"})),
    Case("bench-packed-t65536-h32-d128", _arrays(1, 65536, 32, 128, bounds=(0, 40000, 50000, 50256, 65536)), tags=_BENCH),
)

TOGGLES = {
    "cu_seqlens": Toggle("packed-one-short-sequence", drop="cu_seqlens"),
}
