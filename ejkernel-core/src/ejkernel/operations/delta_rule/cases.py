"""Named problems of `delta_rule`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle


def arrays(
    batch: int = 2,
    length: int = 11,
    heads: int = 2,
    width: int = 4,
    channels: int = 3,
    *,
    query_heads: int | None = None,
    key_heads: int | None = None,
    beta: bool = True,
    decay: str = "head",
    low_rank: str = "",
    state: bool = False,
    ids: tuple[int, ...] | None = None,
    bounds: tuple[int, ...] | None = None,
    strength: float = 1.0,
    extreme: bool = False,
    forget: bool = False,
    garbage: int | None = None,
    magnitude: float = 1.0,
    silent: int | None = None,
    poison: bool = True,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """A maker of arguments.

    Args:
        heads: of value, beta, decay and state; of query and key unless they say otherwise.
        decay: "head", "channel", or "" for none.
        low_rank: which of "a" and "b" are given.
        state: with an initial state.
        ids: segment ids of every row; tokens of ids below 0 hold NaN if `poison`.
        bounds: cumulative lengths; tokens past the last one hold NaN if `poison`.
        strength: beta is up to this; keys have a length of about 1.
        extreme: of the decays a third are -50, a third 0.
        forget: that third is -inf, not -50.
        garbage: the first token whose values are NaN, as are all later ones.
        magnitude: of queries and keys, beside their own.
        silent: a token whose query and key are 0.
    """
    query_heads, key_heads = query_heads or heads, key_heads or heads

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        def normal(*shape: int) -> Any:
            return rng.standard_normal((batch, length, *shape)).astype(np.float32)

        made: dict[str, Any] = {
            "query": normal(query_heads, width),
            "key": normal(key_heads, width) / np.float32(max(width, 1) ** 0.5),
            "value": normal(heads, channels),
        }
        for name in ("query", "key"):
            made[name] *= np.float32(magnitude)
            if silent is not None:
                made[name][:, silent] = 0
        if beta:
            made["beta"] = (strength * rng.random((batch, length, heads))).astype(np.float32)
        if decay:
            logarithm = -0.3 * np.abs(normal(heads, *[width] * (decay == "channel")))
            kind = rng.integers(0, 3, logarithm.shape) if extreme else np.zeros(logarithm.shape, int)
            made["decay"] = np.choose(kind, (logarithm, -np.inf if forget else -50, 0)).astype(np.float32)
        unit = normal(heads, width)
        unit /= np.linalg.norm(unit, axis=-1, keepdims=True) + np.float32(1e-3)
        for name, vectors in (("a", unit * rng.random((batch, length, heads, 1), np.float32)), ("b", -unit)):
            if name in low_rank:
                made[name] = vectors
        if ids is not None:
            made["seg_ids"] = np.tile(np.array(ids, np.int32), (batch, 1))
        if bounds is not None:
            made["cu_seqlens"] = np.array(bounds, np.int32)
        if garbage is not None:
            made["value"][:, garbage:] = np.nan
        _poison(made, ids, bounds, poison)
        if state:
            count = batch if bounds is None else len(bounds) - 1
            shape = (count, max(heads, query_heads, key_heads), width, channels)
            made["initial_state"] = rng.standard_normal(shape).astype(np.float32)
        return made

    return make


def _poison(made: dict[str, Any], ids: Any, bounds: Any, poison: bool) -> None:
    """NaN in every array of tokens where no token takes part."""
    length = made["query"].shape[1]
    outside = np.zeros(length, bool) if ids is None else np.array(ids) < 0
    if bounds is not None:
        outside[bounds[-1] :] = True
    for name in {"query", "key", "value", "beta", "decay", "a", "b"} & made.keys() if poison else ():
        made[name][:, outside] = np.nan


_BENCH, _BOTH, _EXTREME = frozenset({"bench"}), frozenset({"transforms"}), frozenset({"extreme"})
_BENCH_CPU, _SUMS = frozenset({"bench-cpu"}), frozenset({"sums"})
_STATE = {"return_state": True}
_IDS = (-1, 3, 3, 3, 3, -1, 3, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 2, -1, -1)

CASES = (
    Case("plain", arrays(beta=False, decay="")),
    Case("sums", arrays(1, 100, 2, 16, 16), tags=_SUMS),
    Case("sums-by-channel", arrays(1, 100, 2, 16, 16, decay="channel"), tags=_SUMS),
    Case("sums-rank-one", arrays(1, 100, 2, 16, 16, beta=False, decay="channel", low_rank="ab"), tags=_SUMS),
    Case("gated", arrays(state=True), _STATE, tags=_BOTH),
    Case("rank-one", arrays(beta=False, decay="channel", low_rank="ab", state=True), _STATE),
    Case("write-alone", arrays(low_rank="a"), {"softmax_scale": 0.7}),
    Case("read-alone", arrays(low_rank="b", beta=False)),
    Case("normalised", arrays(strength=2.0), {"use_qk_l2norm": True}),
    Case("normalised-zeros", arrays(1, 40, silent=7), {"use_qk_l2norm": True}),
    Case("normalised-large", arrays(1, 40, magnitude=1e24), {"use_qk_l2norm": True}, tags=frozenset({"wide-range"})),
    Case(
        "normalised-large-by-channel",
        arrays(1, 40, decay="channel", magnitude=1e24, silent=3),
        {"use_qk_l2norm": True},
        tags=frozenset({"wide-range"}),
    ),
    Case("normalised-large-steps", arrays(1, 5, magnitude=1e24), {"use_qk_l2norm": True}, tags=frozenset({"wide-range"})),
    Case("grouped", arrays(heads=2, key_heads=1, query_heads=4, state=True), _STATE),
    Case("segments", arrays(1, 20, ids=_IDS, state=True, poison=False), _STATE),
    Case(
        "segments-backwards", arrays(length=20, ids=_IDS, decay="channel", state=True), {"return_state": True, "reverse": True}
    ),
    Case("packed", arrays(1, 23, bounds=(0, 9, 9, 10, 21)), _STATE),
    Case(
        "packed-backwards",
        arrays(1, 15, bounds=(0, 1, 12, 12, 15), decay="channel", state=True),
        {"return_state": True, "use_qk_l2norm": True, "reverse": True},
    ),
    Case("packed-steps", arrays(1, 5, bounds=(0, 1, 2, 3, 4), state=True), _STATE),
    Case("token-by-token", arrays(state=True), {"use_chunked": False, "reverse": True, "return_state": True}),
    # wide enough for chunks everywhere
    Case("token-by-token-wide", arrays(1, 20, 3, 256, 256), {"use_chunked": False}),
    Case("by-channel", arrays(1, 70, decay="channel", state=True), {"use_qk_l2norm": True, "return_state": True}),
    Case("extreme-decays", arrays(1, 70, extreme=True, state=True), _STATE, tags=_EXTREME),
    Case("extreme-decays-by-channel", arrays(1, 70, extreme=True, decay="channel", state=True), _STATE, tags=_EXTREME),
    Case("forgets", arrays(1, 70, extreme=True, forget=True, state=True), _STATE, tags=_EXTREME),
    Case("forgets-by-channel", arrays(1, 20, extreme=True, forget=True, decay="channel", state=True), _STATE, tags=_EXTREME),
    Case("length-1", arrays(length=1, state=True), _STATE),
    Case("length-0", arrays(length=0, state=True), _STATE),
    Case("bench-gated-b1-t1024-h4-d64", arrays(1, 1024, 4, 64, 64), {"use_qk_l2norm": True}, tags=_BENCH_CPU),
    Case(
        "bench-by-channel-b1-t1024-h4-d64",
        arrays(1, 1024, 4, 64, 64, decay="channel"),
        {"use_qk_l2norm": True},
        tags=_BENCH_CPU,
    ),
    Case("bench-gated-b1-t8192-h32-d128", arrays(1, 8192, 32, 128, 128), {"use_qk_l2norm": True}, tags=_BENCH),
    Case(
        "bench-by-channel-b1-t8192-h32-d128",
        arrays(1, 8192, 32, 128, 128, decay="channel"),
        {"use_qk_l2norm": True},
        tags=_BENCH,
    ),
    Case(
        "bench-rank-one-b1-t8192-h32-d64", arrays(1, 8192, 32, 64, 64, beta=False, decay="channel", low_rank="ab"), tags=_BENCH
    ),
)

TOGGLES = {
    "beta": Toggle("gated", drop="beta"),
    "decay": Toggle("gated", drop="decay"),
    "a": Toggle("rank-one", drop="a"),
    "b": Toggle("rank-one", drop="b"),
    "initial_state": Toggle("gated", drop="initial_state"),
    "seg_ids": Toggle("segments", drop="seg_ids"),
    "cu_seqlens": Toggle("packed", drop="cu_seqlens"),
    "softmax_scale": Toggle("write-alone", {"softmax_scale": 0.1}),
    "use_qk_l2norm": Toggle("normalised", {"use_qk_l2norm": False}),
    "use_chunked": Toggle("token-by-token-wide", {"use_chunked": True}, program=True),
    "reverse": Toggle("token-by-token", {"reverse": False}),
    "return_state": Toggle("plain", {"return_state": True}),
}
