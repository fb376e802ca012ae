"""Named problems of `selective_scan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.operations.common.case import Case, Toggle


def arrays(
    batch: int = 2,
    length: int = 12,
    channels: int = 6,
    width: int = 4,
    *,
    skip: bool = True,
    state: bool = False,
    rate: float = 1.0,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """A maker of arguments; `rate` scales A, and dt lies between 0 and 1."""

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
        if skip:
            made["D"] = normal(channels)
        if state:
            made["initial_state"] = normal(batch, channels, width)
        return made

    return make


CASES = (
    Case("state", arrays(state=True), tags=frozenset({"transforms"})),
    Case("plain", arrays(skip=False)),
    Case("skip", arrays(3, 7, 5, 3)),
    Case("one-channel", arrays(1, 9, 1, 1, state=True)),
    Case("wide-state", arrays(1, 6, 3, 17)),
    Case("length-1", arrays(length=1, state=True)),
    Case("length-0", arrays(length=0, state=True)),
    Case("no-batch", arrays(0, 4)),
    Case("long", arrays(1, 150, 3, 2, state=True)),
    Case("slow-decay", arrays(1, 40, 4, 2, rate=1e-3)),
    Case("strong-decay", arrays(1, 20, 4, 2, rate=1e3, state=True), tags=frozenset({"extreme"})),
    Case("bench-b1-t512-i512-n16", arrays(1, 512, 512, 16), tags=frozenset({"bench-cpu"})),
    Case("bench-b2-t4096-i2048-n16", arrays(2, 4096, 2048, 16), tags=frozenset({"bench"})),
    Case("bench-b1-t8192-i5120-n16", arrays(1, 8192, 5120, 16), tags=frozenset({"bench"})),
)

TOGGLES = {
    "D": Toggle("skip", drop="D"),
    "initial_state": Toggle("state", drop="initial_state"),
}
