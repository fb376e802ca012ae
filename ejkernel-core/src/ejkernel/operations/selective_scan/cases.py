"""Named problems of `selective_scan`."""

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
    skip: bool = True,
    state: bool = False,
    rate: float = 1.0,
    forget: bool = False,
    garbage: int | None = None,
    bounds: tuple[int, ...] | None = None,
    segments: tuple[tuple[int, ...], ...] | None = None,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """A maker of arguments; `rate` scales A, and dt lies between 0 and 1.

    Tokens of no sequence, past the last of `bounds` or with an id of `segments` below 0, hold NaN. forget: A of some states is
    -inf. garbage: the first token whose x is NaN, as are all later ones.
    """

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        def normal(*shape: int) -> Any:
            return rng.standard_normal(shape).astype(np.float32)

        made = {
            "x": normal(batch, length, channels),
            "A": -rate * (0.1 + np.abs(normal(channels, width))),
            "B": normal(batch, length, width),
            "C": normal(batch, length, width),
            "dt": rng.random((batch, length, channels)).astype(np.float32),
        }
        if forget:
            made["A"][:, ::2] = -np.inf
        if garbage is not None:
            made["x"][:, garbage:] = np.nan
        if skip:
            made["D"] = normal(channels)
        if state:
            made["initial_state"] = normal(batch if bounds is None else len(bounds) - 1, channels, width)
        unused: Any = None
        if bounds is not None:
            made["cu_seqlens"] = np.array(bounds, np.int32)
            unused = np.broadcast_to(np.arange(length) >= bounds[-1], (batch, length))
        if segments is not None:
            made["seg_ids"] = np.array(segments, np.int32)
            unused = np.broadcast_to(made["seg_ids"] < 0, (batch, length))
        if unused is not None:
            for name in ("x", "B", "C", "dt"):
                made[name][unused] = np.nan
        return made

    return make


CASES = (
    Case("state", arrays(state=True), tags=frozenset({"transforms"})),
    Case("sums", arrays(1, 100, 8, 4), tags=frozenset({"sums"})),
    Case("plain", arrays(skip=False)),
    Case("skip", arrays(3, 7, 5, 3)),
    Case("one-channel", arrays(1, 9, 1, 1, state=True)),
    Case("wide-state", arrays(1, 6, 3, 17)),
    Case("packed", arrays(1, 14, 5, 3, state=True, bounds=(0, 3, 3, 9, 12))),
    Case("packed-no-state", arrays(1, 9, 4, 2, skip=False, bounds=(0, 5, 9))),
    Case("packed-one-token-each", arrays(1, 4, 3, 2, state=True, bounds=(0, 1, 2, 3, 4))),
    Case("packed-nothing", arrays(1, 5, 3, 2, state=True, bounds=(0, 0, 0))),
    Case("packed-no-sequence", arrays(1, 5, 3, 2, bounds=(0,))),
    Case("segments", arrays(2, 8, 5, 3, state=True, segments=((0, 0, 1, 1, 1, 2, 2, 2), (-1, 4, 4, -1, 4, 5, -1, -1)))),
    Case("segments-of-all-rows", arrays(2, 5, 4, 2, segments=((3, 3, 0, 0, 2),))),
    Case("length-1", arrays(length=1, state=True)),
    Case("length-0", arrays(length=0, state=True)),
    Case("no-batch", arrays(0, 4)),
    Case("long", arrays(1, 150, 3, 2, state=True)),
    Case("slow-decay", arrays(1, 40, 4, 2, rate=1e-3)),
    Case("strong-decay", arrays(1, 20, 4, 2, rate=1e3, state=True), tags=frozenset({"extreme"})),
    Case("forgets", arrays(1, 150, 4, 3, forget=True, state=True)),
    Case("garbage-after", arrays(garbage=7), tags=frozenset({"nan"})),
    Case("bench-b1-t512-i512-n16", arrays(1, 512, 512, 16), tags=frozenset({"bench-cpu"})),
    Case("bench-b2-t4096-i2048-n16", arrays(2, 4096, 2048, 16), tags=frozenset({"bench"})),
    Case("bench-b1-t8192-i5120-n16", arrays(1, 8192, 5120, 16), tags=frozenset({"bench"})),
)

TOGGLES = {
    "D": Toggle("skip", drop="D"),
    "initial_state": Toggle("state", drop="initial_state"),
    "resets": Toggle("segments-of-all-rows", drop="seg_ids"),
    "cu_seqlens": Toggle("packed-no-state", drop="cu_seqlens"),
}
