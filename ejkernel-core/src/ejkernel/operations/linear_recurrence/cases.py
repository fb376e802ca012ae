"""Named problems of `linear_recurrence`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle


def arrays(
    batch: int = 2,
    length: int = 20,
    heads: int = 2,
    width: int = 4,
    channels: int = 3,
    *,
    query_heads: int | None = None,
    value_heads: int | None = None,
    decays: str = "",
    bonus: bool = False,
    value_scale: bool = False,
    skip: str = "",
    state: bool = False,
    bounds: tuple[int, ...] | None = None,
    rate: float = 0.5,
    extreme: bool = False,
    forget: bool = False,
    garbage: int | None = None,
    transposed: bool = False,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """A maker of arguments.

    Args:
        heads: of key, and of the others unless they say otherwise.
        decays: which log decays there are, of `"g gamma gk gv"`.
        value_scale: factors of the values, some of them 0 or below.
        skip: whether outputs take the value itself, by "head" or "channel".
        state: with an initial state.
        bounds: cumulative lengths; tokens past the last one hold NaN.
        rate: log decays are `-rate |normal|`.
        extreme: a third of the log decays is -50 instead, and a third 0.
        forget: that third is -inf, not -50.
        garbage: the first token whose keys and values are NaN, as are all later ones.
    """
    query_heads, value_heads = query_heads or heads, value_heads or heads
    most = max(heads, query_heads, value_heads)
    shapes = {
        "query": (batch, length, query_heads, width),
        "key": (batch, length, heads, width),
        "value": (batch, length, value_heads, channels),
        "g": (batch, length, most),
        "gamma": (most,),
        "gk": (batch, length, heads, width),
        "gv": (batch, length, value_heads, channels),
        "bonus": (heads, width),
        "value_scale": (batch, length, most),
        "skip": (most, channels) if skip == "channel" else (most,),
        "initial_state": (batch if bounds is None else len(bounds) - 1, most, width, channels),
    }
    plain = ["query", "key", "value", *["bonus"] * bonus, *["skip"] * bool(skip), *["initial_state"] * state]

    def decay(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        ordinary = -rate * np.abs(rng.standard_normal(shape))
        kind = rng.integers(3, size=shape) if extreme else 2
        return np.where(kind == 2, ordinary, np.where(kind == 1, 0, -np.inf if forget else -50)).astype(np.float32)

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        made: dict[str, Any] = {name: rng.standard_normal(shapes[name]).astype(np.float32) for name in plain}
        if state and transposed:
            made["initial_state"] = np.ascontiguousarray(made["initial_state"].swapaxes(-1, -2))
        made.update({"g_gamma" if name == "gamma" else name: decay(rng, shapes[name]) for name in decays.split()})
        if value_scale:
            made["value_scale"] = np.maximum(rng.standard_normal(shapes["value_scale"]) + 0.5, -0.1).astype(np.float32)
            made["value_scale"][:, ::7] = 0
        if garbage is not None:
            made["key"][:, garbage:], made["value"][:, garbage:] = np.nan, np.nan
        if bounds is not None:
            for name in made.keys() & {"query", "key", "value", "g", "gk", "gv", "value_scale"}:
                made[name][:, bounds[-1] :] = np.nan
            made["cu_seqlens"] = np.array(bounds, np.int32)
        return made

    return make


_STATE = {"return_state": True}
_SCALED: Any = {"value_scale": True, "skip": "head"}
_TRANSPOSED = {**_STATE, "transposed_state": True}
_BENCH, _BENCH_CPU = frozenset({"bench"}), frozenset({"bench-cpu"})
_TRANSFORMS = frozenset({"transforms"})
_EXTREME, _SUMS = frozenset({"extreme"}), frozenset({"sums"})

CASES = (
    Case("gla", arrays(decays="gk", state=True), _STATE, tags=_TRANSFORMS),
    Case("scalar", arrays(length=21, decays="g gamma")),
    Case("no-decay", arrays(length=17)),
    Case("value-decay", arrays(decays="gv g", state=True), _STATE),
    Case("every-decay", arrays(decays="g gamma gk gv", state=True), {"softmax_scale": 1.0, **_STATE}),
    Case("gamma", arrays(decays="gamma"), {"precision": "highest"}),
    Case("bonus", arrays(decays="gk", bonus=True, state=True), _STATE),
    Case("bonus-every-decay", arrays(decays="g gv", bonus=True), {"reverse": True}),
    Case("value-scale", arrays(heads=1, value_heads=4, decays="g", value_scale=True, state=True), _STATE),
    Case("value-scale-bonus", arrays(decays="gk", bonus=True, value_scale=True, skip="head"), {"reverse": True}),
    Case("skip", arrays(heads=1, value_heads=4, decays="g gamma", skip="head", state=True), _STATE, tags=_TRANSFORMS),
    Case(
        "skip-by-channel", arrays(heads=2, query_heads=4, decays="gv", value_scale=True, skip="channel"), {"softmax_scale": 2.0}
    ),
    Case(
        "ssd",
        arrays(heads=2, value_heads=4, decays="g", value_scale=True, skip="channel", state=True, transposed=True),
        {"softmax_scale": 1.0, **_TRANSPOSED},
    ),
    Case(
        "packed-ssd",
        arrays(1, 24, 1, value_heads=4, decays="g", state=True, bounds=(0, 5, 6, 6, 20), **_SCALED),
        _STATE,
    ),
    Case("reverse", arrays(decays="gk gv", state=True), {"reverse": True, **_STATE}),
    Case("query-groups", arrays(heads=2, query_heads=4, decays="g gamma", state=True), _STATE),
    Case("query-groups-shared-state", arrays(heads=1, query_heads=3, decays="gk gv"), _STATE),
    Case("value-groups", arrays(heads=2, value_heads=4, decays="g", state=True), _STATE),
    Case("transposed-state", arrays(heads=1, value_heads=3, decays="g", state=True, transposed=True), _TRANSPOSED),
    Case("transposed-packed", arrays(1, 9, decays="gk", state=True, bounds=(0, 5, 9), transposed=True), _TRANSPOSED),
    Case("packed", arrays(1, 24, decays="g gk", state=True, bounds=(0, 5, 6, 6, 24)), _STATE),
    Case("packed-reset", arrays(1, decays="g", bounds=(0, 7, 20)), tags=_TRANSFORMS),
    Case("packed-tail", arrays(1, decays="gk gv", bonus=True, bounds=(0, 9, 14)), {"reverse": True, **_STATE}),
    Case("packed-no-sequence", arrays(1, 6, decays="g", bounds=(0,), state=True), _STATE),
    Case("long", arrays(1, 150, 1, decays="g gk")),
    Case("long-value-groups", arrays(1, 530, 1, 16, 16, value_heads=3, decays="g", state=True), _STATE),
    Case(
        "long-packed-ssd",
        arrays(1, 600, 1, 16, 16, value_heads=3, decays="g", rate=0.05, bounds=(0, 9, 9, 540, 590), state=True, **_SCALED),
        _STATE,
    ),
    Case("sums-gamma", arrays(1, 65, 2, 32, 32, decays="gamma", rate=2.0), tags=_SUMS),
    Case("sums-gate", arrays(1, 100, 2, 16, 16, decays="g", rate=2.0), tags=_SUMS),
    Case("sums-gate-by-key", arrays(1, 100, 2, 16, 16, decays="gk", rate=2.0), tags=_SUMS),
    Case("sums-ssd", arrays(1, 100, 1, 16, 16, value_heads=3, decays="g gamma", rate=2.0, **_SCALED), tags=_SUMS),
    Case("sums-bonus", arrays(1, 100, 8, 8, 8, decays="gk gamma", bonus=True, rate=2.0), tags=_SUMS),
    Case("square-state", arrays(1, 6, width=4, channels=4, decays="g", state=True), _STATE),
    Case("length-1", arrays(length=1, decays="g gk gv", bonus=True, state=True), _STATE),
    Case("length-0", arrays(length=0, decays="g", state=True), _STATE),
    Case("extreme-key-decay", arrays(length=40, decays="gk", extreme=True, rate=0.05), tags=_EXTREME),
    Case("extreme-decays", arrays(length=40, decays="g gv", extreme=True, rate=0.05, state=True), _STATE, tags=_EXTREME),
    Case("forgets-by-key", arrays(length=40, decays="gk", extreme=True, forget=True, rate=0.05), tags=_EXTREME),
    Case("forgets", arrays(length=40, decays="g gv", extreme=True, forget=True, rate=0.05, state=True), _STATE, tags=_EXTREME),
    Case("forgets-always", arrays(length=9, decays="gamma", extreme=True, forget=True, heads=6), tags=_EXTREME),
    Case("forgets-bonus", arrays(length=9, decays="gk", bonus=True, extreme=True, forget=True), tags=_EXTREME),
    Case("bench-gla-t8192-h32-d128", arrays(1, 8192, 32, 128, 128, decays="gk", rate=0.05), tags=_BENCH),
    Case("bench-scalar-t8192-h32-d128", arrays(1, 8192, 32, 128, 128, decays="g", rate=0.05), tags=_BENCH),
    Case("bench-lightning-t8192-h64-d128", arrays(1, 8192, 64, 128, 128, decays="gamma", rate=0.05), tags=_BENCH),
    Case("bench-gla-t1024-h4-d64", arrays(1, 1024, 4, 64, 64, decays="gk", rate=0.05), tags=_BENCH_CPU),
    Case("bench-scalar-t1024-h4-d64", arrays(1, 1024, 4, 64, 64, decays="g", rate=0.05), tags=_BENCH_CPU),
    Case("bench-ssd-b1-t1024-h8-n64", arrays(1, 1024, 1, 64, 64, value_heads=8, decays="g", rate=0.05), tags=_BENCH_CPU),
    Case("bench-ssd-b4-t4096-h80-n128", arrays(4, 4096, 1, 128, 64, value_heads=80, decays="g", rate=0.05), tags=_BENCH),
)

TOGGLES = {
    "g": Toggle("scalar", drop="g"),
    "g_gamma": Toggle("gamma", drop="g_gamma"),
    "gk": Toggle("gla", drop="gk"),
    "gv": Toggle("value-decay", drop="gv"),
    "bonus": Toggle("bonus", drop="bonus"),
    "value_scale": Toggle("value-scale", drop="value_scale"),
    "skip": Toggle("skip", drop="skip"),
    "initial_state": Toggle("gla", drop="initial_state"),
    "cu_seqlens": Toggle("packed-reset", drop="cu_seqlens"),
    "softmax_scale": Toggle("gla", {"softmax_scale": 2.0}),
    "reverse": Toggle("gla", {"reverse": True}),
    "return_state": Toggle("scalar", {"return_state": True}),
    "transposed_state": Toggle("square-state", {"transposed_state": True}),
    "precision": Toggle("gamma", {"precision": "default"}, program=True),
}
