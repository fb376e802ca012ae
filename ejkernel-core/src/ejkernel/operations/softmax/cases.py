"""Named problems of `softmax`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle


def _arrays(
    *shape: int,
    where: tuple[int, ...] | None = None,
    magnitude: float = 1.0,
    poison: bool = False,
    empty_row: bool = False,
    hidden: bool = False,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """`poison` puts NaN and infinities where `where` is False; `empty_row` makes a row masked and another one all -inf; `hidden`
    puts -inf into a third of the places."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        x = (magnitude * rng.standard_normal(shape)).astype(np.float32)
        if hidden:
            x[rng.random(shape) < 0.3] = -np.inf
        if where is None and empty_row:
            x[0] = -np.inf
        if where is None:
            return {"x": x}
        mask = rng.random(where) < 0.6
        if empty_row:
            mask[0] = False
            x[-1] = -np.inf
        if poison:
            bad = rng.choice(np.array([np.nan, np.inf, -np.inf], np.float32), size=shape)
            x = np.where(np.broadcast_to(mask, shape), x, bad)
        return {"x": x, "where": mask}

    return make


CASES = (
    Case("plain", _arrays(4, 33, 64)),
    Case("scale", _arrays(4, 33, 64), {"scale": 0.37}),
    Case("negative-scale", _arrays(5, 24), {"scale": -2.0}),
    Case("negative-scale-hidden", _arrays(5, 24, hidden=True, empty_row=True), {"scale": -2.0}),
    Case("zero-scale-hidden", _arrays(5, 24, hidden=True), {"scale": 0.0}),
    Case("negative-scale-where", _arrays(4, 9, 40, where=(4, 9, 40), poison=True, hidden=True), {"scale": -0.5}),
    Case("negative-scale-wide", _arrays(3, 4099, hidden=True), {"scale": -0.5}),
    Case("where", _arrays(4, 9, 40, where=(4, 9, 40))),
    Case("where-poisoned", _arrays(4, 9, 40, where=(4, 9, 40), poison=True), {"scale": 1.7}),
    Case("where-empty-row", _arrays(4, 9, 40, where=(4, 9, 40), poison=True, empty_row=True)),
    Case("where-of-lower-rank", _arrays(4, 9, 40, where=(40,), poison=True)),
    Case("where-per-row", _arrays(4, 9, 40, where=(4, 9, 1), poison=True)),
    Case("where-middle", _arrays(4, 9, 40, where=(9, 1)), {"axis": 1}),
    Case("minus-infinity-row", _arrays(4, 40, empty_row=True)),
    Case("extreme", _arrays(4, 64, magnitude=1e4), tags=frozenset({"extreme"})),
    Case("first-axis", _arrays(40, 6), {"axis": 0}),
    Case("two-axes", _arrays(3, 5, 4, 6, where=(5, 1, 6), poison=True), {"axis": (1, -1)}),
    Case("all-axes", _arrays(5, 6, where=(5, 1)), {"axis": None}),
    Case("one-axis", _arrays(37)),
    Case("many-axes", _arrays(2, 1, 2, 1, 3, 1, 2, 1, 8)),
    Case("width-1", _arrays(5, 1)),
    Case("width-0", _arrays(5, 0)),
    Case("no-rows", _arrays(0, 16)),
    Case("wide", _arrays(3, 4099)),
    Case("bench-32768x4096", _arrays(32768, 4096), tags=frozenset({"bench"})),
    Case("bench-131072x128", _arrays(131072, 128), tags=frozenset({"bench"})),
    Case("bench-2048x4096", _arrays(2048, 4096), tags=frozenset({"bench-cpu"})),
    Case("bench-32768x128", _arrays(32768, 128), tags=frozenset({"bench-cpu"})),
)

TOGGLES = {
    "where": Toggle("where", drop="where"),
    "scale": Toggle("scale", {"scale": 1.0}),
}
