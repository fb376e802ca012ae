"""Named problems of `paged_attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.call.case import Case, Toggle
from ejkernel.operations.common.pages import FUSED, INTERLEAVED


def cache_of(
    rng: np.random.Generator,
    requests: Sequence[tuple[int, int]],
    *,
    page_size: int,
    spare_tokens: int = 0,
    spare_entries: int = 1,
    garbage: int = -1,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Starts, lengths and shuffled block tables of requests `(new tokens, keys)`, and which slots `[P, page_size]` are in use.

    Table entries beyond need hold `garbage`; there are two pages that nobody uses.
    """
    need = [-(-keys // page_size) for _, keys in requests]
    pages = sum(need) + 2
    free = iter(rng.permutation(pages))
    tables = np.full((len(requests), max(need, default=0) + spare_entries), garbage, np.int32)
    used = np.zeros((pages, page_size), bool)
    for row, (count, (_, keys)) in enumerate(zip(need, requests, strict=True)):
        tables[row, :count] = [next(free) for _ in range(count)]
        slots = np.arange(keys)
        used[tables[row, slots // page_size], slots % page_size] = True
    starts = np.concatenate([[0], np.cumsum([new for new, _ in requests])])
    described = {
        "query_start_loc": starts.astype(np.int32),
        "kv_lens": np.array([keys for _, keys in requests], np.int32),
        "block_tables": tables,
    }
    return described, used


def fused_tail(layout: str, heads: int, size: int) -> tuple[int, ...]:
    """The axes after the tokens of pages that hold keys and values, in groups of 2 where the layout has groups."""
    if layout == INTERLEAVED:
        return 2 * heads, size
    return (heads, 2, size) if layout == "packed" else (heads // 2, 2, 2 * size)


def _arrays(
    requests: Sequence[tuple[int, int]],
    *,
    page_size: int = 4,
    heads: int = 4,
    key_heads: int = 2,
    head_size: int = 8,
    value_size: int | None = None,
    layout: str = "pthd",
    padded_heads: int = 0,
    padded_size: int = 0,
    spare_tokens: int = 0,
    stored: Any = None,
    k_scale: tuple[int, ...] | None = None,
    v_scale: tuple[int, ...] | None = None,
    token_scales: int = 0,
    first_keys: bool = False,
    sinks: tuple[int, ...] | None = None,
    alibi: bool = False,
    tree: int = 0,
    trees: bool = False,
    poison: bool = True,
    garbage: int = -1,
    shared: bool = False,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """Slots that no request uses hold NaN if `poison` and the dtype has one, and so do their `token_scales` (of so many heads)."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        described, used = cache_of(rng, requests, page_size=page_size, garbage=garbage)
        if shared:
            described["block_tables"][1, 0] = described["block_tables"][0, 0]
        tokens = int(described["query_start_loc"][-1]) + spare_tokens

        def pages(*tail: int) -> Any:
            array = rng.standard_normal((*used.shape, *tail)).astype(np.float32)
            if stored is not None:
                array = array * (40 if stored == "int8" else 4)
            if poison and stored != "int8":
                array[~used] = np.nan
            return array.astype(np.float32 if stored is None else jnp.dtype(stored))

        arrays: dict[str, Any] = {"query": rng.standard_normal((tokens, heads, head_size)).astype(np.float32), **described}
        if layout in FUSED:
            arrays["key_pages"] = pages(*fused_tail(layout, key_heads + padded_heads, head_size + padded_size))
        else:
            order = {"pthd": (0, 1, 2, 3), "phtd": (0, 2, 1, 3), "hptd": (2, 0, 1, 3)}[layout]
            arrays["key_pages"] = pages(key_heads, head_size).transpose(order)
            arrays["value_pages"] = pages(key_heads, value_size or head_size).transpose(order)
        for name, shape in (("k_scale", k_scale), ("v_scale", v_scale)):
            if shape is not None:
                arrays[name] = rng.uniform(0.02, 0.05, shape).astype(np.float32) * (1 if stored == "int8" else 10)
        for name in ("k_scale", "v_scale") if token_scales else ():
            scales = rng.uniform(0.2, 0.5, (*used.shape, token_scales)) / (10 if stored == "int8" else 1)
            scales[~used] = np.nan
            arrays[name] = scales.astype(np.float32)
        if first_keys:
            arrays["first_keys"] = rng.integers(-2, 7, tokens, np.int32)
        if sinks is not None:
            arrays["softmax_aux"] = rng.standard_normal(sinks).astype(np.float32)
        if alibi:
            arrays["alibi_slopes"] = rng.uniform(0.1, 0.5, heads).astype(np.float32)
        if tree:
            shape = (len(requests), tree, tree) if trees else (tree, tree)
            bias = rng.standard_normal(shape).astype(np.float32)
            hidden = rng.random(shape) < 0.4
            arrays["qq_bias"] = np.where(hidden & ~np.eye(tree, dtype=bool), -np.inf, bias).astype(np.float32)
        return arrays

    return make


_DECODE = ((1, 5), (1, 9), (1, 1))
_PROMPTS = ((40, 90), (1, 34), (3, 0), (0, 5), (20, 20))
_MIXED = ((3, 3), (1, 7), (5, 9))
_LARGE: dict[str, Any] = {"page_size": 16, "heads": 32, "key_heads": 8, "head_size": 128}
_LARGER_PAGES: dict[str, Any] = {**_LARGE, "page_size": 64}
_FLOAT8: dict[str, Any] = {"stored": "float8_e4m3fn", "k_scale": (), "v_scale": ()}
_BENCH = frozenset({"bench"})
_BENCH_FLOAT8 = frozenset({"bench-float8"})
_TRANSFORMS = frozenset({"transforms"})

CASES = (
    Case("decode", _arrays(_DECODE), {"return_lse": True}),
    Case("mixed", _arrays(_MIXED, spare_tokens=2, garbage=10**6)),
    Case(
        "everything",
        _arrays(((3, 6), (1, 7)), sinks=(4,), alibi=True, tree=4, k_scale=(2,), v_scale=()),
        {"sliding_window": 4, "logits_soft_cap": 3.0, "return_lse": True, "softmax_scale": 0.5},
    ),
    Case("empty-contexts", _arrays(((1, 0), (0, 5), (1, 3), (0, 0)), sinks=(1, 2)), {"return_lse": True}),
    Case("no-requests", _arrays((), spare_tokens=3)),
    Case("window", _arrays(((4, 9), (1, 6), (1, 2))), {"sliding_window": 3}),
    Case("chunks", _arrays(((3, 13), (1, 8), (9, 9), (1, 3), (5, 2)), spare_tokens=2), {"chunk_size": 4, "return_lse": True}),
    Case(
        "chunks-of-pages",
        _arrays(((7, 17), (0, 9), (1, 9), (1, 0)), page_size=2, sinks=(4,), alibi=True),
        {"chunk_size": 6, "sliding_window": 5},
    ),
    Case("first-keys", _arrays(((4, 9), (1, 6), (1, 2), (2, 11)), first_keys=True, spare_tokens=1), {"return_lse": True}),
    Case("soft-cap", _arrays(_MIXED), {"logits_soft_cap": 2.0}),
    Case("sinks", _arrays(((2, 3), (1, 6)), sinks=(4,)), {"return_lse": True}, _TRANSFORMS),
    Case("alibi", _arrays(_MIXED, alibi=True), {"return_lse": True}),
    Case("tree", _arrays(_MIXED, tree=4, trees=True)),
    Case("not-causal", _arrays(_MIXED), {"causal": False}),
    Case("precision", _arrays(_DECODE), {"precision": "highest"}),
    Case("int8", _arrays(_MIXED, stored="int8", k_scale=(2,), v_scale=(2,))),
    Case("e4m3", _arrays(_DECODE, stored="float8_e4m3fn", k_scale=(), v_scale=(1,))),
    Case("int8-of-tokens", _arrays(_MIXED, stored="int8", token_scales=2), {"return_lse": True}),
    Case(
        "e4m3-of-tokens",
        _arrays(_DECODE, stored="float8_e4m3fn", token_scales=1, layout="phtd"),
        {"layout": "phtd", "logits_soft_cap": 3.0, "sliding_window": 6},
    ),
    Case(
        "scales-of-tokens",
        _arrays(((3, 6), (1, 7)), token_scales=2, sinks=(4,), first_keys=True, layout="packed"),
        {"layout": "packed", "return_lse": True},
    ),
    Case("e5m2-unscaled", _arrays(_DECODE, stored="float8_e5m2")),
    Case(
        "e4m3-heads-of-128",
        _arrays(((1, 70), (2, 37), (1, 0)), page_size=16, heads=8, key_heads=4, head_size=128, sinks=(8,), **_FLOAT8),
        {"return_lse": True},
    ),
    Case(
        "int8-heads-of-128",
        _arrays(((2, 50), (1, 9)), page_size=8, heads=6, head_size=128, layout=INTERLEAVED, stored="int8", k_scale=(2,)),
        {"layout": INTERLEAVED, "sliding_window": 20},
    ),
    Case(
        "interleaved-padded",
        _arrays(_DECODE, layout=INTERLEAVED, padded_heads=1, padded_size=3),
        {"layout": INTERLEAVED, "key_heads": 2},
    ),
    Case("packed", _arrays(_DECODE, layout="packed", padded_heads=1), {"layout": "packed", "key_heads": 2}),
    Case("side-by-side", _arrays(_DECODE, layout="side_by_side"), {"layout": "side_by_side"}),
    Case("square", _arrays(_DECODE, page_size=2, heads=2, poison=False)),
    Case("heads-before-tokens", _arrays(_MIXED, layout="phtd"), {"layout": "phtd"}),
    Case("heads-first", _arrays(_MIXED, layout="hptd"), {"layout": "hptd"}),
    Case("value-size", _arrays(_MIXED, value_size=5)),
    Case("one-token-pages", _arrays(((2, 3), (1, 6)), page_size=1)),
    Case("shared-page", _arrays(((2, 6), (2, 7)), shared=True)),
    Case("prompts", _arrays(_PROMPTS, page_size=16, spare_tokens=3), {"return_lse": True}),
    Case(
        "prompts-in-a-window",
        _arrays(_PROMPTS, page_size=8, heads=6, head_size=24, value_size=16, sinks=(6,), layout="phtd", garbage=10**6),
        {"layout": "phtd", "sliding_window": 20, "logits_soft_cap": 3.0},
    ),
    Case(
        "prompts-interleaved",
        _arrays(_PROMPTS, page_size=16, heads=3, key_heads=3, head_size=16, layout=INTERLEAVED),
        {"layout": INTERLEAVED, "causal": False},
    ),
    Case("bench-decode-b64-4k", _arrays(((1, 4096),) * 64, **_LARGE), tags=_BENCH),
    Case("bench-decode-b1-128k", _arrays(((1, 131072),), **_LARGER_PAGES), tags=_BENCH),
    Case("bench-float8-decode-b64-4k", _arrays(((1, 4096),) * 64, **_LARGE, **_FLOAT8), tags=_BENCH_FLOAT8),
    Case("bench-float8-decode-b1-128k", _arrays(((1, 131072),), **_LARGER_PAGES, **_FLOAT8), tags=_BENCH_FLOAT8),
    Case(
        "bench-decode-b8-1k",
        _arrays(((1, 1024),) * 8, page_size=16, heads=8, key_heads=2, head_size=64),
        tags=frozenset({"bench-cpu"}),
    ),
    Case(
        "bench-mixed-prefill-1k",
        _arrays(((1, 512),) * 4 + ((256, 1024),), page_size=16, heads=8, key_heads=2, head_size=64),
        tags=frozenset({"bench-cpu"}),
    ),
    Case(
        "bench-mixed-prefill",
        _arrays(((1, 4096),) * 32 + ((2048, 4096),), **_LARGE),
        tags=_BENCH,
    ),
)

TOGGLES = {
    "value_pages": Toggle("square", {"layout": INTERLEAVED}, drop="value_pages"),
    "layout": Toggle("square", {"layout": "phtd"}),
    "key_heads": Toggle("interleaved-padded", {"key_heads": 1}),
    "softmax_aux": Toggle("sinks", drop="softmax_aux"),
    "alibi_slopes": Toggle("alibi", drop="alibi_slopes"),
    "qq_bias": Toggle("tree", drop="qq_bias"),
    "key_scale": Toggle("int8", drop="k_scale"),
    "value_scale": Toggle("int8", drop="v_scale"),
    "key_token_scale": Toggle("int8-of-tokens", drop="k_scale"),
    "value_token_scale": Toggle("int8-of-tokens", drop="v_scale"),
    "first_keys": Toggle("first-keys", drop="first_keys"),
    "softmax_scale": Toggle("mixed", {"softmax_scale": 2.0}),
    "causal": Toggle("not-causal", {"causal": True}),
    "window": Toggle("window", {"sliding_window": 2}),
    "logits_soft_cap": Toggle("soft-cap", {"logits_soft_cap": 0.5}),
    "precision": Toggle("precision", {"precision": "default"}, program=True, dtype="float32"),
    "return_lse": Toggle("decode", {"return_lse": False}, program=True),
}
