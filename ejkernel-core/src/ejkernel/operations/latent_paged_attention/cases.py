"""Named problems of `latent_paged_attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.call.case import Case, Toggle
from ejkernel.operations.paged_attention.cases import cache_of


def _arrays(
    requests: Sequence[tuple[int, int]],
    *,
    page_size: int = 4,
    heads: int = 3,
    size: int = 6,
    rotary: int = 4,
    channels: int | None = None,
    spare_tokens: int = 0,
    stored: Any = None,
    scales: bool = False,
    first_keys: bool = False,
) -> Callable[[np.random.Generator], Mapping[str, Any]]:
    """Slots that no request uses hold NaN if the dtype has one."""

    def make(rng: np.random.Generator) -> Mapping[str, Any]:
        described, used = cache_of(rng, requests, page_size=page_size)
        tokens = int(described["query_start_loc"][-1]) + spare_tokens
        pages = rng.standard_normal((*used.shape, channels or size + rotary)).astype(np.float32)
        if stored is not None:
            pages = pages * (40 if stored == "int8" else 4)
        if stored != "int8":
            pages[~used] = np.nan
        arrays = {
            "query_nope": rng.standard_normal((tokens, heads, size)).astype(np.float32),
            "query_pe": rng.standard_normal((tokens, heads, rotary)).astype(np.float32),
            "pages": pages.astype(np.float32 if stored is None else jnp.dtype(stored)),
            **described,
        }
        if first_keys:
            arrays["first_keys"] = rng.integers(-2, 6, tokens, np.int32)
        if scales:
            size_of_one = 0.03 if stored == "int8" else 0.3
            arrays |= {name: np.float32(size_of_one * rng.uniform(0.8, 1.2)) for name in ("k_scale", "v_scale")}
        return arrays

    return make


_DECODE = ((1, 5), (1, 9), (1, 1))
_MIXED = ((3, 3), (1, 7), (5, 9))

CASES = (
    Case("decode", _arrays(_DECODE), {"return_lse": True}),
    Case("mixed", _arrays(_MIXED, spare_tokens=2)),
    Case("empty-contexts", _arrays(((1, 0), (0, 5), (1, 3), (0, 0))), {"return_lse": True}),
    Case("no-requests", _arrays((), spare_tokens=3)),
    Case("no-rotary-part", _arrays(_DECODE, rotary=0)),
    Case("padded-channels", _arrays(_MIXED, channels=16), {"pe_offset": 8}),
    Case("first-keys", _arrays(((4, 9), (1, 6), (1, 2)), first_keys=True, spare_tokens=1)),
    Case("window", _arrays(((4, 9), (1, 6), (1, 2))), {"sliding_window": 3}),
    Case("soft-cap", _arrays(_MIXED), {"logits_soft_cap": 1.0}),
    Case("scale", _arrays(_DECODE), {"softmax_scale": 1.0}),
    Case("int8", _arrays(_MIXED, stored="int8", scales=True)),
    Case("e4m3", _arrays(_DECODE, stored="float8_e4m3fn", scales=True)),
    Case("e5m2-unscaled", _arrays(_DECODE, stored="float8_e5m2")),
    Case(
        "everything",
        _arrays(((3, 6), (1, 7)), heads=4, channels=13, scales=True),
        {"sliding_window": 4, "logits_soft_cap": 3.0, "return_lse": True, "softmax_scale": 0.5, "pe_offset": 8},
        frozenset({"transforms"}),
    ),
    Case(
        "bench-decode-b8-1k",
        _arrays(((1, 1024),) * 8, page_size=64, heads=16, size=128, rotary=32),
        tags=frozenset({"bench-cpu"}),
    ),
    Case(
        "bench-decode-b128-4k",
        _arrays(((1, 4096),) * 128, page_size=64, heads=128, size=512, rotary=64),
        tags=frozenset({"bench"}),
    ),
)

TOGGLES = {
    "key_scale": Toggle("everything", drop="k_scale"),
    "value_scale": Toggle("everything", drop="v_scale"),
    "pe_offset": Toggle("padded-channels", {"pe_offset": 7}),
    "softmax_scale": Toggle("scale", {"softmax_scale": None}),
    "window": Toggle("window", {"sliding_window": None}),
    "first_keys": Toggle("first-keys", drop="first_keys"),
    "logits_soft_cap": Toggle("soft-cap", {"logits_soft_cap": None}),
    "precision": Toggle("decode", {"precision": "default"}, program=True, dtype="float32"),
    "return_lse": Toggle("decode", {"return_lse": False}, program=True),
}
