"""Named problems of `sample_tokens`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle


def arrays(
    *shape: int,
    keys: bool = False,
    mask: tuple[int, ...] | None = None,
    grid: float = 0.0,
    magnitude: float = 2.0,
    special: Mapping[tuple[int, ...], float] | None = None,
    **settings: Any,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """`keys`: one for each row; `grid`: the distance between logits, so that some are equal; `special`: logits of rows or places;
    `settings`: temperature, top_k, top_p and min_p, of all rows or of each."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        logits = (magnitude * rng.standard_normal(shape)).astype(np.float32)
        if grid:
            logits = (grid * np.round(logits / grid)).astype(np.float32)
        for place, value in (special or {}).items():
            logits[place] = value
        found = {"logits": logits, "key": rng.integers(0, 2**32, (*shape[:-1], 2) if keys else 2, np.uint32)}
        for name, value in settings.items():
            found[name] = np.asarray(value, np.int32 if name == "top_k" else np.float32)
        if mask is not None:
            found["token_mask"] = rng.random(mask) < 0.6
        return found

    return make


_LOGPROBS = {"return_logprobs": True}
_NAN = frozenset({"nan"})
_BENCH = frozenset({"bench"})
_TRANSFORMS = frozenset({"transforms"})
_ROWS: dict[str, Any] = {
    "temperature": (1.0, 0.0, 0.5, 2.0, 0.25),
    "top_k": (0, 5, 1, 40, 3),
    "top_p": (1.0, 0.5, 0.75, 0.25, 0.875),
    "min_p": (0.0, 0.5, 0.0625, 0.0, 0.125),
}

CASES = (
    Case("plain", arrays(6, 33), _LOGPROBS, _TRANSFORMS),
    Case("every-setting-per-row", arrays(5, 57, keys=True, mask=(5, 57), **_ROWS), _LOGPROBS, _TRANSFORMS),
    Case("tokens-alone", arrays(6, 33, temperature=0.5)),
    Case("keys-per-row", arrays(6, 33, keys=True), _LOGPROBS),
    Case("temperature", arrays(6, 33, temperature=0.5), _LOGPROBS),
    Case("greedy", arrays(6, 33, temperature=0.0), _LOGPROBS),
    Case("greedy-of-equals", arrays(6, 33, temperature=0.0, grid=2.0), _LOGPROBS),
    Case("top-k", arrays(6, 65, top_k=7), _LOGPROBS),
    Case("static-top-k", arrays(6, 65), {**_LOGPROBS, "static_top_k": 7}),
    Case("static-top-k-top-p", arrays(6, 65, top_p=0.75), {**_LOGPROBS, "static_top_k": 9}),
    Case("static-top-k-of-equals", arrays(6, 65, grid=1.0, top_p=0.75), {**_LOGPROBS, "static_top_k": 9}),
    Case("static-top-k-past-all", arrays(6, 65), {**_LOGPROBS, "static_top_k": 65}),
    Case("top-p", arrays(6, 65, top_p=0.75), _LOGPROBS),
    Case("top-p-of-equals", arrays(6, 65, grid=1.0, top_p=0.625), _LOGPROBS),
    Case("top-p-0", arrays(6, 65, top_p=0.0), _LOGPROBS),
    Case("top-k-top-p", arrays(6, 65, top_k=9, top_p=0.75), _LOGPROBS),
    Case("min-p", arrays(6, 65, min_p=0.125), _LOGPROBS),
    Case("min-p-1", arrays(6, 65, min_p=1.0, grid=1.0), _LOGPROBS),
    Case("mask", arrays(6, 65, mask=(6, 65)), _LOGPROBS),
    Case("mask-of-all-rows", arrays(6, 65, mask=(65,), top_k=5), _LOGPROBS),
    Case("mask-nothing-left", arrays(3, 9, special={(1,): -np.inf}, mask=(3, 9), top_p=0.5), _LOGPROBS, _NAN),
    Case(
        "not-finite",
        arrays(7, 17, special={(0, 3): np.nan, (1, 2): np.inf, (2, 5): -np.inf, (3,): -np.inf, (4, 1): np.inf, (4, 9): np.inf}),
        _LOGPROBS,
        _NAN,
    ),
    Case("nan-temperature", arrays(3, 9, temperature=(np.nan, 1.0, np.inf)), _LOGPROBS, _NAN),
    Case("cold", arrays(6, 33, temperature=2.0**-40), _LOGPROBS),
    Case("large-logits", arrays(6, 33, magnitude=1e4, top_p=0.5), _LOGPROBS),
    Case("one-row", arrays(33), _LOGPROBS),
    Case("three-axes", arrays(2, 3, 33, keys=True, top_p=np.full((2, 3), 0.75)), _LOGPROBS),
    Case("four-axes", arrays(2, 1, 3, 33, mask=(3, 33)), _LOGPROBS),
    Case("one-token", arrays(4, 1, top_k=3, top_p=0.5), _LOGPROBS),
    Case("no-rows", arrays(0, 9), _LOGPROBS),
    Case("wide", arrays(2, 4099, top_k=50, top_p=0.875), _LOGPROBS),
    Case("bench-64x128256", arrays(64, 128256, top_k=50, top_p=0.9), tags=_BENCH),
    Case("bench-64x128256-temperature", arrays(64, 128256, temperature=0.7), tags=_BENCH),
    Case("bench-8x32000", arrays(8, 32000, top_k=50, top_p=0.9), tags=frozenset({"bench-cpu"})),
)

TOGGLES = {
    "top_k": Toggle("top-k", drop="top_k"),
    "top_p": Toggle("top-p", drop="top_p"),
    "min_p": Toggle("min-p", drop="min_p"),
    "token_mask": Toggle("mask", drop="token_mask"),
    "static_top_k": Toggle("static-top-k", {"static_top_k": None}),
    "return_logprobs": Toggle("plain", {"return_logprobs": False}),
}
