"""Named problems of `causal_conv1d`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle


def arrays(
    batch: int = 2,
    length: int = 12,
    channels: int = 6,
    width: int = 4,
    *,
    bias: bool = True,
    state: bool = False,
    ids: tuple[int, ...] | None = None,
    bounds: tuple[int, ...] | None = None,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """A maker of arguments. `ids` are segments of every row, `bounds` cumulative lengths; tokens of neither hold NaN."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        def normal(*shape: int) -> Any:
            return rng.standard_normal(shape).astype(np.float32)

        made = {"x": normal(batch, length, channels), "weight": normal(channels, width)}
        if bias:
            made["bias"] = normal(channels)
        if ids is not None:
            made["seg_ids"] = np.tile(np.array(ids, np.int32), (batch, 1))
            made["x"][made["seg_ids"] < 0] = np.nan
        if bounds is not None:
            made["cu_seqlens"] = np.array(bounds, np.int32)
            made["x"][:, bounds[-1] :] = np.nan
        if state:
            made["initial_state"] = normal(batch if bounds is None else len(bounds) - 1, width - 1, channels)
        return made

    return make


_SILU, _STATE = {"activation": "silu"}, {"activation": "silu", "return_state": True}
_BENCH = frozenset({"bench"})
_DOCUMENTS = (0, 3, 900, 901, 4000, 8192)

CASES = (
    Case("silu", arrays(3, 9, 5, 3), _SILU, tags=frozenset({"transforms"})),
    Case("state", arrays(state=True), _STATE, tags=frozenset({"transforms"})),
    Case("sums", arrays(1, 100, 8), tags=frozenset({"sums"})),
    Case("plain", arrays(bias=False)),
    Case("width-2", arrays(width=2, state=True), _STATE),
    Case("wide", arrays(1, 5, 3, 9, state=True), _STATE),
    Case("one-channel", arrays(1, 9, 1, 4), _SILU),
    Case("segments", arrays(2, 14, ids=(3, 3, 3, 3, 3, 0, 0, 7, 7, 7, 7, 7, 7, 7), state=True), _STATE),
    Case("segments-padded", arrays(2, 12, ids=(-1, -1, 4, 4, 4, 4, 4, -1, 2, 2, -1, -1), state=True), _STATE),
    Case("segments-right-padded", arrays(1, 9, ids=(0, 0, -1, -1, -1, -1, -1, -1, -1), state=True), _STATE),
    Case("segments-all-padding", arrays(1, 3, ids=(-1, -1, -1), state=True), _STATE),
    Case("packed", arrays(1, 23, bounds=(0, 9, 9, 10, 12, 21), state=True), _STATE),
    Case("packed-without-state", arrays(1, 15, bounds=(0, 1, 12, 15)), _STATE),
    Case("packed-steps", arrays(1, 5, bounds=(0, 1, 2, 3, 4), state=True), _STATE),
    Case("length-1", arrays(length=1, state=True), _STATE),
    Case("length-0", arrays(length=0, state=True), _STATE),
    Case("packed-length-0", arrays(1, 0, bounds=(0, 0, 0), state=True), _STATE),
    Case("no-batch", arrays(0, 4), _SILU),
    Case("long", arrays(1, 300, 40, state=True), _STATE),
    Case("bench-b1-t1024-c1024-w4", arrays(1, 1024, 1024), _SILU, tags=frozenset({"bench-cpu"})),
    Case("bench-b2-t4096-c4096-w4", arrays(2, 4096, 4096), _SILU, tags=_BENCH),
    Case("bench-packed-t8192-c8192-w4", arrays(1, 8192, 8192, bounds=_DOCUMENTS), _SILU, tags=_BENCH),
    Case("bench-step-b64-c8192-w4", arrays(64, 1, 8192, state=True), _STATE, tags=_BENCH),
)

TOGGLES = {
    "bias": Toggle("silu", drop="bias"),
    "initial_state": Toggle("state", drop="initial_state"),
    "seg_ids": Toggle("segments", drop="seg_ids"),
    "cu_seqlens": Toggle("packed-without-state", drop="cu_seqlens"),
    "activation": Toggle("silu", {"activation": None}),
    "return_state": Toggle("plain", {"return_state": True}),
}
