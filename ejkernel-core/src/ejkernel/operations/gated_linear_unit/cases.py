"""Named problems of `gated_linear_unit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle


def arrays(
    *shape: int, packed: bool = False, magnitude: float = 2.0, special: Mapping[tuple[int, ...], float] | None = None
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """gate and up of this shape, or both in one array of it; `special` are elements of the gate."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        gate = (magnitude * rng.standard_normal(shape)).astype(np.float32)
        for place, value in (special or {}).items():
            gate[place] = value
        return {"gate": gate} if packed else {"gate": gate, "up": (magnitude * rng.standard_normal(shape)).astype(np.float32)}

    return make


_NAN = frozenset({"nan"})
_BENCH = frozenset({"bench"})
_TRANSFORMS = frozenset({"transforms"})
_SPECIAL = {(0, 3): np.nan, (1, 2): np.inf, (2, 1): -np.inf, (3, 0): 0.0}
_KINDS = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")
_GPT_OSS = {"alpha": 1.702, "limit": 2.0, "up_offset": 1.0}

CASES = (
    Case("silu", arrays(4, 6, 40), tags=_TRANSFORMS),
    Case("packed", arrays(4, 6, 40, packed=True), tags=_TRANSFORMS),
    *(Case(kind.replace("_", "-"), arrays(4, 6, 40), {"activation": kind}) for kind in _KINDS[1:]),
    *(Case(f"{kind.replace('_', '-')}-packed", arrays(5, 34, packed=True), {"activation": kind}) for kind in _KINDS[1:]),
    Case("gpt-oss", arrays(4, 40), _GPT_OSS),
    Case("gpt-oss-packed", arrays(4, 40, packed=True), _GPT_OSS),
    Case("alpha", arrays(4, 40), {"alpha": 1.702}),
    Case("limit", arrays(4, 40), {"limit": 1.5}),
    Case("limit-gelu", arrays(4, 40), {"limit": 1.5, "activation": "gelu"}),
    Case("up-offset", arrays(4, 40), {"up_offset": 1.0}),
    *(Case(f"{kind.replace('_', '-')}-wide-range", arrays(4, 40, magnitude=60.0), {"activation": kind}) for kind in _KINDS),
    Case("large", arrays(4, 40, magnitude=1e8), tags=frozenset({"wide-range"})),
    *(
        Case(f"{kind.replace('_', '-')}-not-finite", arrays(5, 16, special=_SPECIAL), {"activation": kind}, _NAN)
        for kind in _KINDS
    ),
    Case("limit-not-finite", arrays(5, 16, special=_SPECIAL), {"limit": 2.0}, _NAN),
    Case("vector", arrays(33)),
    Case("tails", arrays(3, 257)),
    Case("packed-odd", arrays(3, 258, packed=True)),
    Case("many-axes", arrays(2, 1, 3, 2, 16)),
    Case("width-1", arrays(5, 1)),
    Case("width-0", arrays(5, 0)),
    Case("no-rows", arrays(0, 16)),
    Case("bench-16384x14336", arrays(16384, 14336), tags=_BENCH),
    Case("bench-16384x28672-packed", arrays(16384, 28672, packed=True), tags=_BENCH),
    Case("bench-1024x4096", arrays(1024, 4096), tags=frozenset({"bench-cpu"})),
)

TOGGLES = {
    "up": Toggle("silu", drop="up"),
    "activation": Toggle("silu", {"activation": "gelu"}),
    "alpha": Toggle("alpha", {"alpha": 1.0}),
    "limit": Toggle("limit", {"limit": None}),
    "up_offset": Toggle("up-offset", {"up_offset": 0.0}),
}
