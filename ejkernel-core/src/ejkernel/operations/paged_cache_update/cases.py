"""Named problems of `paged_cache_update`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.call.case import Case, Toggle
from ejkernel.operations.common.pages import FUSED, INTERLEAVED
from ejkernel.operations.paged_attention.cases import cache_of, fused_tail


def _arrays(
    requests: Sequence[tuple[int, int]],
    *,
    page_size: int = 4,
    heads: int = 2,
    head_size: int = 8,
    value_size: int | None = None,
    layout: str = "pthd",
    padded_heads: int = 0,
    padded_size: int = 0,
    spare_tokens: int = 0,
    stored: Any = None,
    scales: tuple[int, ...] | None = None,
    broken: bool = False,
    cached: bool = True,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """`broken` gives one request a table entry outside of the cache, and another one more keys than its table holds; without
    `cached` all entries are outside, as the cache has no pages."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        described, used = cache_of(rng, requests, page_size=page_size, spare_entries=0)
        if broken:
            described["block_tables"][0, 0] = len(used)
            described["kv_lens"][1] = described["block_tables"].shape[1] * page_size + 1
        used = used if cached else used[:0]
        tokens = int(described["query_start_loc"][-1]) + spare_tokens
        values = head_size if value_size is None else value_size

        def pages(*tail: int) -> Any:
            array = rng.standard_normal((*used.shape, *tail)).astype(np.float32)
            return array if stored is None else (array * 40).astype(jnp.dtype(stored))

        arrays: dict[str, Any] = {
            "key": rng.standard_normal((tokens, heads, head_size)).astype(np.float32),
            "value": rng.standard_normal((tokens, heads, values)).astype(np.float32),
            **described,
        }
        if layout in FUSED:
            arrays["key_pages"] = pages(*fused_tail(layout, heads + padded_heads, head_size + padded_size))
        else:
            order = {"pthd": (0, 1, 2, 3), "phtd": (0, 2, 1, 3), "hptd": (2, 0, 1, 3)}[layout]
            arrays["key_pages"], arrays["value_pages"] = (pages(heads, size).transpose(order) for size in (head_size, values))
        if scales is not None:
            arrays["k_scale"], arrays["v_scale"] = (rng.uniform(0.02, 0.1, scales).astype(np.float32) for _ in range(2))
        return arrays

    return make


_MIXED = ((3, 3), (1, 7), (5, 9), (0, 4))
_DECODE = ((1, 5), (1, 9), (1, 1))

CASES = (
    Case("decode", _arrays(_DECODE)),
    Case("mixed", _arrays(_MIXED, spare_tokens=2)),
    Case("scaled", _arrays(((2, 3), (1, 6)), scales=(2,)), tags=frozenset({"transforms"})),
    Case("dropped", _arrays(((2, 2), (2, 6)), broken=True)),
    Case("no-tokens", _arrays(((0, 3), (0, 1)))),
    Case("no-requests", _arrays((), spare_tokens=2)),
    Case("int8", _arrays(_MIXED, stored="int8", scales=())),
    Case("int8-saturated", _arrays(_DECODE, stored="int8", scales=(2,), head_size=64)),
    Case("e4m3", _arrays(_MIXED, stored="float8_e4m3fn", scales=(2,))),
    Case("e5m2-unscaled", _arrays(_DECODE, stored="float8_e5m2")),
    Case("interleaved", _arrays(_MIXED, layout=INTERLEAVED), {"layout": INTERLEAVED}),
    Case(
        "interleaved-padded",
        _arrays(_DECODE, layout=INTERLEAVED, padded_heads=1, padded_size=3, scales=()),
        {"layout": INTERLEAVED},
    ),
    Case("packed", _arrays(_MIXED, layout="packed", padded_heads=1), {"layout": "packed"}),
    Case("side-by-side", _arrays(_DECODE, layout="side_by_side"), {"layout": "side_by_side"}),
    Case("square", _arrays(_DECODE, page_size=2)),
    Case("single-head", _arrays(_DECODE, heads=1, page_size=2, layout="phtd"), {"layout": "phtd"}),
    Case("heads-before-tokens", _arrays(_MIXED, layout="phtd"), {"layout": "phtd"}),
    Case("heads-first", _arrays(_MIXED, layout="hptd", scales=(2,)), {"layout": "hptd"}),
    Case("value-size", _arrays(_MIXED, value_size=5)),
    Case(
        "bench-decode-b8-1k",
        _arrays(((1, 1024),) * 8, page_size=16, heads=2, head_size=64),
        tags=frozenset({"bench-cpu"}),
    ),
    Case(
        "bench-decode-b64-4k",
        _arrays(((1, 4096),) * 64, page_size=16, heads=8, head_size=128),
        tags=frozenset({"bench"}),
    ),
)

TOGGLES = {
    "value_pages": Toggle("single-head", {"layout": INTERLEAVED}, drop="value_pages"),
    "layout": Toggle("square", {"layout": "phtd"}),
    "key_scale": Toggle("scaled", drop="k_scale"),
    "value_scale": Toggle("scaled", drop="v_scale"),
}
