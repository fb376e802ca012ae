"""Named problems of `moe_route`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle


def arrays(
    tokens: int,
    experts: int,
    *,
    bias: bool = False,
    masked: float = 0.0,
    levels: int = 0,
    nan: bool = False,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """A maker of arguments. A share `masked` of the logits, and the first token's, are -inf; `levels` makes ties; `nan` puts NaN
    into the last token's."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        logits = (2 * rng.standard_normal((tokens, experts))).astype(np.float32)
        if levels:
            logits = rng.integers(0, levels, (tokens, experts)).astype(np.float32)
        if masked:
            logits[rng.random(logits.shape) < masked] = -np.inf
            logits[:1] = -np.inf
        if nan:
            logits[-1, experts // 2] = np.nan
        return (
            {"logits": logits, "bias": (0.1 * rng.standard_normal(experts)).astype(np.float32)} if bias else {"logits": logits}
        )

    return make


_V2 = {"k": 6, "num_groups": 8, "top_groups": 3, "normalize": False, "scale": 16.0}
_V3 = {"k": 8, "scoring": "sigmoid", "num_groups": 8, "top_groups": 4, "scale": 2.5}
_RAW = {"k": 3, "normalize": False}
_NAN, _BENCH, _CPU = (frozenset({tag}) for tag in ("nan", "bench", "bench-cpu"))

_KINK = frozenset({"kink"})

CASES = (
    Case("softmax", arrays(7, 8), {"k": 2}, tags=frozenset({"transforms"})),
    Case("sigmoid-bias-groups", arrays(5, 64, bias=True), _V3, tags=frozenset({"transforms"})),
    Case("softmax-of-all", arrays(7, 12), _RAW),
    Case("softmax-bias", arrays(6, 16, bias=True), {"k": 4}),
    Case("softmax-groups", arrays(9, 160), _V2),
    Case("softmax-bias-groups", arrays(9, 32, bias=True), {"k": 3, "num_groups": 4, "top_groups": 2}),
    Case("sigmoid", arrays(7, 24), {"k": 5, "scoring": "sigmoid"}),
    Case("sigmoid-groups", arrays(7, 24), {"k": 2, "scoring": "sigmoid", "num_groups": 6, "top_groups": 2}),
    Case("sigmoid-as-they-are", arrays(7, 16), {"k": 1, "scoring": "sigmoid", "normalize": False}),
    Case("sigmoid-bias", arrays(7, 128, bias=True), {"k": 8, "scoring": "sigmoid", "scale": 0.5}),
    Case("groups-of-1", arrays(6, 8), {"k": 2, "scoring": "sigmoid", "num_groups": 8, "top_groups": 3}),
    Case("ties", arrays(33, 16, levels=3), {"k": 4}, _KINK),
    Case("ties-groups", arrays(33, 16, levels=2), {"k": 4, "scoring": "sigmoid", "num_groups": 4, "top_groups": 2}, _KINK),
    Case("masked", arrays(9, 10, masked=0.7), {"k": 4}),
    Case("masked-of-all", arrays(9, 10, masked=0.7), _RAW),
    Case("masked-groups", arrays(17, 32, bias=True, masked=0.8), {**_V3, "k": 4}),
    Case("nan", arrays(5, 16, nan=True), {"k": 2}, tags=_NAN),
    Case(
        "nan-sigmoid",
        arrays(5, 16, bias=True, nan=True),
        {"k": 2, "scoring": "sigmoid", "num_groups": 4, "top_groups": 1},
        tags=_NAN,
    ),
    Case("every-expert", arrays(4, 5), {"k": 5}),
    Case("one-expert", arrays(4, 1), {"k": 1, "scoring": "sigmoid"}),
    Case("one-token", arrays(1, 256, bias=True), _V3),
    Case("no-tokens", arrays(0, 8), {"k": 2}),
    Case("no-tokens-groups", arrays(0, 8), {"k": 2, "num_groups": 4, "top_groups": 2}),
    Case("many", arrays(130, 256, bias=True), _V3),
    Case("bench-t2048-e64-k8", arrays(2048, 64), {"k": 8}, tags=_CPU),
    Case("bench-t2048-e256-k8", arrays(2048, 256, bias=True), _V3, tags=_CPU),
    Case("bench-t8192-e8-k2", arrays(8192, 8), {"k": 2}, tags=_BENCH),
    Case("bench-t16384-e64-k8", arrays(16384, 64), {"k": 8}, tags=_BENCH),
    Case("bench-t16384-e256-k8", arrays(16384, 256, bias=True), _V3, tags=_BENCH),
)

TOGGLES = {
    "k": Toggle("softmax", {"k": 3}),
    "bias": Toggle("sigmoid-bias", drop="bias"),
    "scoring": Toggle("softmax-of-all", {"scoring": "sigmoid"}),
    "num_groups": Toggle("sigmoid-groups", {"num_groups": 3}),
    "top_groups": Toggle("sigmoid-groups", {"top_groups": 1}),
    "normalize": Toggle("softmax", {"normalize": False}),
    "scale": Toggle("sigmoid-bias", {"scale": 1.0}),
}
