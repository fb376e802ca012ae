"""Named problems of `block_sparse_attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ejkernel.call.case import Case, Toggle

Extra = Callable[[np.random.Generator, dict[str, Any]], None]


def _arrays(
    queries: int = 24,
    keys: int | None = None,
    heads: int = 2,
    key_heads: int | None = None,
    size: int = 8,
    value_size: int | None = None,
    batch: int = 2,
    *,
    bias: tuple[int, ...] | None = None,
    sinks: tuple[int, ...] | None = None,
    extra: Extra | None = None,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    keys = queries if keys is None else keys

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        def normal(*shape: int) -> Any:
            return rng.standard_normal(shape).astype(np.float32)

        arrays: dict[str, Any] = {
            "query": normal(batch, queries, heads, size),
            "key": normal(batch, keys, key_heads or heads, size),
            "value": normal(batch, keys, key_heads or heads, value_size or size),
        }
        if bias is not None:
            arrays["bias"] = normal(*bias)
        if sinks is not None:
            arrays["softmax_aux"] = normal(*sinks)
        if extra is not None:
            extra(rng, arrays)
        return arrays

    return make


def _given(**arrays: Any) -> Extra:
    return lambda rng, made: made.update({name: np.asarray(array) for name, array in arrays.items()})


def _ids(*sizes: int, padding: int = 0) -> np.ndarray:
    return np.concatenate([np.repeat(np.arange(len(sizes)), sizes), np.full(padding, -1)]).astype(np.int32)


def _documents(*rows: Any) -> Extra:
    return _given(query_segments=np.stack(rows), key_segments=np.stack(rows))


def _masked(rng: np.random.Generator, made: dict[str, Any]) -> None:
    """A dense mask that leaves whole tiles empty and whole tiles full, and NaN where nobody looks."""
    mask = rng.random((2, 1, 24, 24)) < 0.5
    mask[:, :, :8, :8], mask[:, :, 8:16, 16:], mask[..., 5] = True, False, False
    made["mask"] = mask
    made["key"][:, 5] = np.nan
    made["value"][:, 5] = np.inf


_LISTS = _given(
    key_tiles=np.array([[[0, -1, 2], [1, 2, -1], [0, 1, 2]], [[2, -1, -1], [-1, -1, -1], [2, 1, -1]]], np.int32),
    full_tiles=np.array([[[1, 0, 0], [1, 1, 0], [1, 1, 1]], [[1, 0, 0], [0, 0, 0], [1, 0, 0]]], bool),
)
_SHARED_LIST = _given(key_tiles=np.array([[[0, 2], [1, -1], [0, 1]]], np.int32))
_BLOCKS = {"q_blocksize": 8, "kv_blocksize": 8}
_BLOCKS_OF_16 = {"q_blocksize": 16, "kv_blocksize": 16}


def _head_lists(rng: np.random.Generator, made: dict[str, Any], batch: int = 2) -> None:
    """Lists of 4 heads for 3 x 3 tiles: every head others, one without any tile of a block, full tiles among them."""
    some = rng.random((batch, 4, 3, 3)) < 0.6
    some[0, 1], some[-1, 2, 1] = np.eye(3, dtype=bool), False
    order = np.argsort(~some, axis=-1, kind="stable")
    made["key_tiles"] = np.where(np.take_along_axis(some, order, -1), order, -1).astype(np.int32)
    made["full_tiles"] = (made["key_tiles"] >= 0) & (rng.random(some.shape) < 0.5)


def _head_lists_of_16(rng: np.random.Generator, made: dict[str, Any]) -> None:
    """The members share them; tiles are masked, so none is full."""
    _head_lists(rng, made, batch=1)
    del made["full_tiles"]


def window_and_sinks(query: Any, key: Any) -> Any:
    """The last 6 keys and the first 3."""
    return (key <= query) & ((key > query - 6) | (key < 3))


def strided(query: Any, key: Any) -> Any:
    """Every fifth key."""
    return (query - key) % 5 == 0


_EVERYTHING = _arrays(
    heads=4, key_heads=2, value_size=5, bias=(1, 4, 24, 24), sinks=(4, 2), extra=_documents(_ids(9, 12, padding=3), _ids(4, 20))
)

CASES = (
    Case("causal", _arrays(33), {"causal": True}),
    Case("window", _arrays(40, 29, heads=4, key_heads=2), {"sliding_window": (6, 2)}),
    Case("chunk", _arrays(33, value_size=5), {"chunk_size": 7, "causal": True}),
    Case("prefix", _arrays(33), {"causal": True, "prefix": 9}),
    Case("documents", _arrays(40, extra=_documents(_ids(13, 20, 7), _ids(30, 3, padding=7)))),
    Case("documents-causal", _arrays(40, heads=6, key_heads=2, extra=_documents(_ids(13, 20, 7))), {"causal": True}),
    Case(
        "positions",
        _arrays(12, 20, extra=_given(
            query_positions=(np.arange(12, dtype=np.int32) * 2)[None],
            key_positions=np.stack([np.arange(20), 19 - np.arange(20)]).astype(np.int32),
        )),
        {"causal": True, "sliding_window": (8, None)},
    ),
    Case("query-positions", _arrays(3, 20, extra=_given(query_positions=np.array([[4, 5, 6], [17, 18, 19]]))), {"causal": True}),
    Case("lengths", _arrays(batch=3, extra=_given(query_lengths=np.array([24, 9, 0], np.int32))), {"causal": True}),
    Case("mask", _arrays(extra=_masked)),
    Case("predicate", _arrays(33, sinks=(2,)), {"mask_builder": window_and_sinks}, frozenset({"transforms"})),
    Case("predicate-documents", _arrays(extra=_documents(_ids(9, 15))), {"mask_builder": strided, "causal": True}),
    Case("lists", _arrays(batch=2, extra=_LISTS), _BLOCKS),
    Case("lists-tails", _arrays(21, 19, heads=4, key_heads=2, bias=(2, 4, 21, 19), extra=_LISTS), _BLOCKS),
    Case("lists-masked", _arrays(21, 19, extra=_SHARED_LIST), {**_BLOCKS, "causal": True}),
    Case("lists-per-head", _arrays(24, 19, heads=4, key_heads=2, extra=_head_lists), _BLOCKS, frozenset({"transforms"})),
    Case("lists-per-head-16", _arrays(40, 33, heads=4, key_heads=2, extra=_head_lists_of_16), {**_BLOCKS_OF_16, "causal": True}),
    Case("bottom-right", _arrays(13, 29), {"causal": True, "causal_alignment": "bottom_right"}),
    Case("bias", _arrays(bias=(2, 2, 24, 24)), {"causal": True}),
    Case("sinks-empty-rows", _arrays(sinks=(2,), extra=_documents(_ids(10, padding=14))), {"causal": True}),
    Case("soft-cap", _arrays(), {"logits_soft_cap": 2.0, "causal": True}),
    Case("scale", _arrays(), {"softmax_scale": 0.75, "causal": True}),
    Case("no-keys", _arrays(5, 0), {"mask_builder": strided}),
    Case("one-token", _arrays(1), {"causal": True}),
    Case("everything", _EVERYTHING, {"causal": True, "sliding_window": 10, "logits_soft_cap": 4.0}, frozenset({"transforms"})),
    *(
        Case(f"bench-documents-4096-{count}", _arrays(4096, heads=8, key_heads=2, size=64, batch=1, extra=_documents(
            _ids(*[4096 // count] * count))), {"causal": True}, frozenset({"bench", "bench-cpu"}))
        for count in (1, 4, 16)
    ),
    Case("bench-documents-32768-16", _arrays(32768, heads=16, key_heads=4, size=128, batch=1, extra=_documents(_ids(
        *[2048] * 16))), {"causal": True}, frozenset({"bench"})),
)  # fmt: skip


def _lists_of_first_head(arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: array[:, 0] if name in ("key_tiles", "full_tiles") else array for name, array in arrays.items()}


TOGGLES = {
    "bias": Toggle("bias", drop="bias"),
    "mask": Toggle("mask", drop="mask"),
    "query_segments": Toggle("lengths", drop="query_lengths"),
    "key_segments": Toggle("lengths", drop="query_lengths"),
    "query_positions": Toggle("query-positions", drop="query_positions"),
    "key_positions": Toggle("positions", drop="key_positions"),
    "softmax_aux": Toggle("predicate", drop="softmax_aux"),
    "softmax_scale": Toggle("scale", {"softmax_scale": None}),
    "causal": Toggle("causal", {"causal": False}),
    "window": Toggle("window", {"sliding_window": None}),
    "chunk_size": Toggle("chunk", {"chunk_size": None}),
    "prefix": Toggle("prefix", {"prefix": None}),
    "logits_soft_cap": Toggle("soft-cap", {"logits_soft_cap": None}),
    "query_offset": Toggle("bottom-right", {"causal_alignment": None}),
    "key_tiles": Toggle("lists-masked", {"q_blocksize": None, "kv_blocksize": None}, drop="key_tiles"),
    "full_tiles": Toggle("lists", drop="full_tiles", program=True),
    "q_blocksize": Toggle("lists-tails", {"q_blocksize": 7}),
    "kv_blocksize": Toggle("lists-tails", {"kv_blocksize": 7}),
    "mask_builder": Toggle("predicate", {"mask_builder": None}),
    "per_head_tiles": Toggle("lists-per-head", change=_lists_of_first_head),
}
