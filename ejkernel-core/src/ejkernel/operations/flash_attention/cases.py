"""Named problems of `flash_attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle
from ejkernel.operations.flash_attention.score_functions.cases import SCORE_TOGGLES, score_cases

Arrays = Callable[[np.random.Generator], Mapping[str, Any]]


def _arrays(
    queries: int = 17,
    keys: int | None = None,
    heads: int = 2,
    key_heads: int | None = None,
    size: int = 8,
    value_size: int | None = None,
    batch: int = 2,
    *,
    bias: tuple[int, ...] | None = None,
    sinks: tuple[int, ...] | None = None,
    magnitude: float = 1.0,
    extra: Callable[[np.random.Generator, dict[str, Any]], None] | None = None,
) -> Arrays:
    keys = queries if keys is None else keys
    key_heads = key_heads or heads

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        def normal(*shape: int, factor: float = 1.0) -> Any:
            return (factor * rng.standard_normal(shape)).astype(np.float32)

        arrays: dict[str, Any] = {
            "query": normal(batch, queries, heads, size, factor=magnitude),
            "key": normal(batch, keys, key_heads, size, factor=magnitude),
            "value": normal(batch, keys, key_heads, value_size or size),
        }
        if bias is not None:
            arrays["bias"] = normal(*bias)
        if sinks is not None:
            arrays["softmax_aux"] = normal(*sinks)
        if extra is not None:
            extra(rng, arrays)
        return arrays

    return make


def _given(**arrays: Any) -> Callable[[np.random.Generator, dict[str, Any]], None]:
    return lambda rng, made: made.update({name: np.asarray(array) for name, array in arrays.items()})


def _lengths(query: tuple[int, ...] | None = None, key: tuple[int, ...] | None = None) -> Any:
    lengths = {"query_lengths": query, "key_lengths": key}
    return _given(**{name: np.array(given, np.int32) for name, given in lengths.items() if given is not None})


def _mask(*shape: int) -> Any:
    def add(rng: np.random.Generator, made: dict[str, Any]) -> None:
        made["mask"] = rng.random(shape) < 0.6

    return add


def _segments(sizes: tuple[int, ...], padding: int = 0, positions: bool = False) -> Any:
    ids = np.concatenate([np.repeat(np.arange(len(sizes)), sizes), np.full(padding, -1)]).astype(np.int32)[None]
    restarted = np.concatenate([*(np.arange(size) for size in sizes), np.zeros(padding)]).astype(np.int32)[None]
    given = {"query_segments": ids, "key_segments": ids}
    return _given(**given, **({"query_positions": restarted, "key_positions": restarted} if positions else {}))


def _poisoned(rng: np.random.Generator, made: dict[str, Any]) -> None:
    """NaN and Inf wherever nothing may look: keys and queries past the lengths, and the bias of those pairs."""
    made.update(query_lengths=np.array([17, 11], np.int32), key_lengths=np.array([9, 14], np.int32))
    made["query"][1, 11:] = np.nan
    for name, bad in (("key", np.nan), ("value", np.inf)):
        made[name][0, 9:] = bad
        made[name][1, 14:] = -bad
    made["bias"][0, :, :, 9:] = np.nan
    made["bias"][1, :, 11:] = np.inf


def _poisoned_mask(rng: np.random.Generator, made: dict[str, Any]) -> None:
    """NaN in the bias of masked pairs and in a key that a dense mask hides from every query."""
    made["mask"] = rng.random(made["bias"].shape) < 0.6
    made["mask"][..., 5] = False
    made["bias"][~made["mask"]] = np.nan
    made["key"][:, 5] = np.nan
    made["value"][:, 5] = np.nan


def _infinite_bias(rng: np.random.Generator, made: dict[str, Any]) -> None:
    """Bias -inf, as masks are often written, on single pairs and on one whole row."""
    made["bias"][rng.random(made["bias"].shape) < 0.3] = -np.inf
    made["bias"][0, 0, 3] = -np.inf


_SEED = _given(dropout_seed=np.array([7, 11], np.uint32))


def _everything(rng: np.random.Generator, made: dict[str, Any]) -> None:
    _SEED(rng, made)
    _segments((9, 12), 3)(rng, made)
    _mask(2, 1, 24, 24)(rng, made)


_HEADS = (
    Case("plain", _arrays(), tags=frozenset({"transforms"})),
    Case("tails", _arrays(33, 50, size=16)),
    Case("more-queries", _arrays(41, 19)),
    Case("gqa", _arrays(20, heads=6, key_heads=2)),
    Case("gqa-causal-tail", _arrays(37, 53, heads=4, key_heads=2, size=16), {"causal": True}),
    Case("mqa", _arrays(20, heads=3, key_heads=1)),
    Case("value-size", _arrays(18, 25, size=12, value_size=5)),
    Case("wide-value", _arrays(18, size=4, value_size=24)),
    Case("head-size-1", _arrays(9, size=1)),
    Case("head-size-37", _arrays(21, size=37, batch=1)),
    Case("scale", _arrays(), {"softmax_scale": 0.75}),
)

_POSITIONAL = (
    Case("causal", _arrays(33), {"causal": True}),
    Case("causal-more-queries", _arrays(30, 12), {"causal": True}),
    Case("bottom-right", _arrays(13, 29), {"causal": True, "causal_alignment": "bottom_right"}),
    Case("bottom-right-empty-rows", _arrays(29, 13), {"causal": True, "causal_alignment": "bottom_right"}),
    Case("window", _arrays(40), {"sliding_window": 5}),
    Case("window-sides", _arrays(31, 44), {"sliding_window": (3, 7)}),
    Case("window-left", _arrays(40), {"sliding_window": (6, None)}),
    Case("window-right", _arrays(40), {"sliding_window": (None, 4)}),
    Case("window-causal", _arrays(40), {"sliding_window": 9, "causal": True}),
    Case("window-0", _arrays(21), {"sliding_window": 0}),
    Case("window-empty-rows", _arrays(40, 17), {"sliding_window": (4, 2)}),
    Case("chunk", _arrays(45), {"chunk_size": 16}),
    Case("chunk-causal", _arrays(45, heads=4, key_heads=2), {"chunk_size": 7, "causal": True}),
    Case("prefix", _arrays(34), {"causal": True, "prefix": 10}),
    Case("prefix-window", _arrays(34), {"causal": True, "prefix": 10, "sliding_window": (12, 3)}),
    Case(
        "positions",
        _arrays(12, 20, extra=_given(
            query_positions=(np.arange(12, dtype=np.int32) * 2)[None],
            key_positions=np.stack([np.arange(20), 19 - np.arange(20)]).astype(np.int32),
        )),
        {"causal": True, "sliding_window": (8, None)},
    ),
    Case(
        "query-positions",
        _arrays(3, 20, extra=_given(query_positions=np.array([[4, 5, 6], [17, 18, 19]], np.int32))),
        {"causal": True},
    ),
)  # fmt: skip

_MASKED = (
    Case("segments", _arrays(40, extra=_segments((13, 20, 7)))),
    Case("segments-causal-padding", _arrays(40, extra=_segments((13, 20), 7)), {"causal": True}),
    Case("segments-positions", _arrays(40, extra=_segments((13, 20), 7, positions=True)), {"causal": True, "chunk_size": 6}),
    Case("query-lengths", _arrays(22, extra=_lengths(query=(22, 9)))),
    Case("key-lengths", _arrays(15, 30, extra=_lengths(key=(30, 11)))),
    Case("lengths-0-and-1", _arrays(12, 14, batch=3, extra=_lengths((12, 0, 1), (0, 14, 1))), {"causal": True}),
    Case("mask", _arrays(19, 23, extra=_mask(2, 2, 19, 23))),
    Case("mask-batch", _arrays(19, 23, extra=_mask(2, 1, 1, 23))),
    Case("mask-heads", _arrays(19, 23, heads=4, key_heads=2, extra=_mask(1, 4, 19, 1))),
    Case("mask-shared", _arrays(19, 23, extra=_mask(19, 23)), {"causal": True}),
    Case("mask-nothing-visible", _arrays(11, extra=_given(mask=np.zeros((1, 1, 1, 1), bool)))),
    Case("nan-in-masked-places", _arrays(17, 20, bias=(2, 2, 17, 20), extra=_poisoned)),
    Case("nan-under-mask", _arrays(17, 20, bias=(2, 1, 17, 20), extra=_poisoned_mask), {"causal": True}),
    Case("no-queries", _arrays(0, 5)),
    Case("no-keys", _arrays(5, 0)),
    Case("one-token", _arrays(1), {"causal": True}),
    Case("one-query", _arrays(1, 37, heads=4, key_heads=2)),
    Case("no-batch", _arrays(5, batch=0)),
)

_LOGITS = (
    *(
        # A bias that is the same for all keys of a row moves the log-sum-exp only.
        Case(
            f"bias-{'x'.join(map(str, shape))}",
            _arrays(13, 21, bias=shape),
            {"causal": len(shape) == 2, "return_lse": shape[-1] == 1},
        )
        for shape in ((2, 2, 13, 21), (1, 2, 13, 21), (2, 1, 1, 21), (1, 1, 13, 1), (1, 1, 1, 1), (13, 21))
    ),
    Case("bias-gqa", _arrays(13, 21, heads=4, key_heads=2, bias=(1, 4, 13, 21)), {"sliding_window": (6, 3)}),
    Case("bias-minus-infinity", _arrays(13, 21, bias=(2, 2, 13, 21), extra=_infinite_bias)),
    Case("bias-minus-infinity-capped", _arrays(13, 21, bias=(2, 2, 13, 21), extra=_infinite_bias), {"logits_soft_cap": 3.0}),
    Case("sinks", _arrays(19, sinks=(2,)), {"causal": True}),
    Case("sinks-several", _arrays(19, heads=4, key_heads=2, sinks=(4, 3)), {"sliding_window": 6}),
    Case("sinks-shared", _arrays(19, heads=4, key_heads=2, sinks=(1, 2))),
    Case("sinks-empty-rows", _arrays(12, sinks=(2,), extra=_lengths(key=(12, 0)))),
    Case("soft-cap", _arrays(23, 30, magnitude=2.0), {"logits_soft_cap": 3.0}),
    Case(
        "soft-cap-causal-window",
        _arrays(33, bias=(1, 1, 33, 33)),
        {"logits_soft_cap": 5.0, "causal": True, "sliding_window": 8},
    ),
    Case("extreme-logits", _arrays(19, 24, magnitude=60.0), {"causal": True}, frozenset({"extreme"})),
    Case(
        "extreme-sinks",
        _arrays(11, extra=_given(softmax_aux=np.array([200.0, -200.0], np.float32))),
        {},
        frozenset({"extreme"}),
    ),
    Case("logits-bfloat16", _arrays(15), {"logits_dtype": "bfloat16"}),
    Case("dropout", _arrays(21, 26, heads=4, key_heads=2, extra=_SEED), {"dropout_prob": 0.3}),
    Case("dropout-causal", _arrays(33, extra=_SEED), {"dropout_prob": 0.5, "causal": True}),
    Case("unnormalised", _arrays(19, 25), {"normalize_output": False}),
    Case("unnormalised-sinks", _arrays(19, sinks=(2, 2)), {"normalize_output": False, "causal": True, "return_lse": True}),
    Case("lse", _arrays(19, 25, heads=4, key_heads=2), {"return_lse": True}),
    Case("lse-empty-rows", _arrays(29, 13), {"return_lse": True, "causal": True, "causal_alignment": "bottom_right"}),
    Case(
        "everything",
        _arrays(24, heads=4, key_heads=2, value_size=5, bias=(1, 4, 24, 24), sinks=(4, 2), extra=_everything),
        {"causal": True, "sliding_window": 10, "logits_soft_cap": 4.0, "dropout_prob": 0.2, "return_lse": True},
        frozenset({"transforms"}),
    ),
)

_BENCH = tuple(
    Case(
        f"bench-{name}-{length}",
        _arrays(length, heads=8, key_heads=key_heads, size=64, batch=1),
        options,
        frozenset({"bench-cpu"}),
    )
    for length in (512, 2048, 4096)
    for name, key_heads, options in (
        ("full", 8, {"causal": False}),
        ("causal", 8, {"causal": True}),
        ("gqa-causal", 2, {"causal": True}),
        ("window-256", 8, {"causal": True, "sliding_window": (256, 0)}),
    )
)

_BENCH_GPU = tuple(
    Case(
        f"bench-8192-{name}",
        _arrays(8192, heads=heads, key_heads=key_heads, size=size, batch=2, bias=bias),
        options,
        frozenset({"bench"}),
    )
    for name, heads, key_heads, size, bias, options in (
        ("gqa-causal", 32, 8, 128, None, {"causal": True}),
        ("causal", 16, 16, 128, None, {"causal": True}),
        ("full", 16, 16, 128, None, {}),
        ("full-d64", 32, 32, 64, None, {}),
        ("window-4096-cap-d256", 16, 8, 256, None, {"causal": True, "sliding_window": (4095, 0), "logits_soft_cap": 50.0}),
        ("window-128-d64", 64, 8, 64, None, {"causal": True, "sliding_window": (127, 0)}),
        ("causal-bias", 16, 16, 128, (1, 1, 8192, 8192), {"causal": True}),
        ("causal-key-bias", 16, 16, 128, (2, 1, 1, 8192), {"causal": True}),
    )
)

_BENCH_CHUNKS = tuple(
    Case(
        f"bench-{queries}-over-{keys}{name}",
        _arrays(queries, keys, heads=heads, key_heads=key_heads, size=size, batch=1),
        options,
        frozenset({"bench"}),
    )
    for queries, keys, heads, key_heads, size, name, options in (
        (1, 131072, 32, 8, 128, "", {}),
        (16, 32768, 32, 8, 128, "-causal", {"causal": True, "causal_alignment": "bottom_right"}),
        (256, 32768, 16, 4, 128, "-causal", {"causal": True, "causal_alignment": "bottom_right"}),
        (512, 8192, 16, 16, 64, "", {}),
        (4096, 4096, 9, 9, 128, "", {}),
    )
)
"""Few blocks of queries: a chunk of new tokens over many keys, or one sequence with few heads."""

CASES = (*_HEADS, *_POSITIONAL, *_MASKED, *_LOGITS, *score_cases(_arrays), *_BENCH, *_BENCH_GPU, *_BENCH_CHUNKS)

TOGGLES = {
    "bias": Toggle("bias-2x2x13x21", drop="bias"),
    "mask": Toggle("mask", drop="mask"),
    "query_segments": Toggle("query-lengths", drop="query_lengths"),
    "key_segments": Toggle("key-lengths", drop="key_lengths"),
    "query_positions": Toggle("query-positions", drop="query_positions"),
    "key_positions": Toggle("positions", drop="key_positions"),
    "softmax_aux": Toggle("sinks", drop="softmax_aux"),
    "dropout_streams": Toggle("dropout", {"dropout_prob": 0.0}),
    "softmax_scale": Toggle("scale", {"softmax_scale": None}),
    "causal": Toggle("causal", {"causal": False}),
    "query_offset": Toggle("bottom-right", {"causal_alignment": None}),
    "window": Toggle("window", {"sliding_window": None}),
    "chunk_size": Toggle("chunk", {"chunk_size": None}),
    "prefix": Toggle("prefix", {"prefix": None}),
    "logits_soft_cap": Toggle("soft-cap", {"logits_soft_cap": None}),
    "dropout_rate": Toggle("dropout", {"dropout_prob": 0.6}),
    "normalize_output": Toggle("unnormalised", {"normalize_output": True}),
    "logits_dtype": Toggle("logits-bfloat16", {"logits_dtype": "float32"}),
    "precision": Toggle("plain", {"precision": "default"}, program=True, dtype="float32"),
    "return_lse": Toggle("lse", {"return_lse": False}, program=True),
    **SCORE_TOGGLES,
}
