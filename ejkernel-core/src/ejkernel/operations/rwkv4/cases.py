"""Named problems of `rwkv4`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle


def arrays(
    batch: int = 2,
    length: int = 12,
    channels: int = 6,
    *,
    state: bool = False,
    magnitude: float = 1.0,
    shift: float = 0.0,
    forget: bool = False,
    garbage: int | None = None,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """A maker of arguments; keys are `shift + magnitude * normal`, the denominator of a state is above 1. forget:
    every second channel forgets at once, as exp(w) overflows float32. garbage: the first token whose values are NaN, as are all
    later ones."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        def normal(*shape: int) -> Any:
            return rng.standard_normal(shape).astype(np.float32)

        made = {
            "w": normal(channels) - 1,
            "u": normal(channels),
            "k": shift + magnitude * normal(batch, length, channels),
            "v": normal(batch, length, channels),
        }
        if forget:
            made["w"][::2] = 200
        if garbage is not None:
            made["v"][:, garbage:] = np.nan
        if state:
            numerator, exponent = normal(2, batch, channels)
            made["state"] = np.stack([numerator, 1 + np.abs(normal(batch, channels)), exponent], axis=1)
        return made

    return make


_STATE = {"return_state": True}

CASES = (
    Case("state", arrays(state=True), _STATE, tags=frozenset({"transforms"})),
    Case("sums", arrays(1, 100, 8), tags=frozenset({"sums"})),
    Case("plain", arrays()),
    Case("return-state", arrays(3, 7, 5), _STATE),
    Case("from-state", arrays(1, 9, 4, state=True)),
    Case("one-channel", arrays(1, 5, 1), _STATE),
    Case("length-1", arrays(length=1, state=True), _STATE),
    Case("length-1-nothing-seen", arrays(length=1), _STATE),
    Case("length-0", arrays(length=0), _STATE),
    Case("no-batch", arrays(0, 4)),
    Case("long", arrays(1, 150, 3, state=True), _STATE),
    Case("large-keys", arrays(1, 20, 4, magnitude=30.0, shift=200.0), _STATE, tags=frozenset({"extreme"})),
    Case("small-keys", arrays(1, 20, 4, magnitude=30.0, shift=-200.0), tags=frozenset({"extreme"})),
    Case("forgets", arrays(forget=True, state=True), _STATE),
    Case("garbage-after", arrays(garbage=7), tags=frozenset({"nan"})),
    Case("bench-b2-t512-c512", arrays(2, 512, 512), tags=frozenset({"bench-cpu"})),
    Case("bench-b8-t4096-c2048", arrays(8, 4096, 2048), tags=frozenset({"bench"})),
)

TOGGLES = {
    "state": Toggle("from-state", drop="state"),
    "return_state": Toggle("plain", {"return_state": True}),
}
