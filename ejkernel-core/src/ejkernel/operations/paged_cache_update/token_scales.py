"""Rows that are quantised as they are stored, each with a scale of its own that is stored beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.pages import PageShape, canonical_pages, check_layout
from ejkernel.operations.paged_cache_update.interface import OPERATION
from ejkernel.utils.checks import check_array, check_compute, check_shape


def update_with_token_scales(
    *,
    key: Any,
    value: Any,
    key_pages: Any,
    value_pages: Any,
    k_scale_cache: Any,
    v_scale_cache: Any,
    described: Mapping[str, Any],
    layout: str,
    platform: Any,
) -> tuple[Any, Any, Any, Any]:
    """`paged_cache_update` of the rows divided by their scales, and once more of the scales, as heads of one channel.

    Args:
        key, value: `[N, K, D]`, `[N, K, V]`, floating.
        key_pages, value_pages: int8, float8_e4m3fn or float8_e5m2, as layout says.
        k_scale_cache, v_scale_cache: `[pages, page_size, K]`, floating.
        described: query_start_loc, kv_lens and block_tables.
        layout: of the pages.
        platform: of both updates.

    Returns:
        Key pages, value pages, and the two caches of scales.
    """
    check_layout(layout)
    rows: dict[str, Any] = {}
    scales: dict[str, Any] = {}
    given = (
        ("key", key, key_pages, "k_scale_cache", k_scale_cache),
        ("value", value, value_pages, "v_scale_cache", v_scale_cache),
    )
    for name, new, pages, scale_name, cache in given:
        check_compute(name, new, ndim=3)
        canonical_pages(f"{name}_pages", pages, layout)
        if jnp.dtype(pages.dtype).itemsize != 1:
            remedy = f"leave out {scale_name}"
            raise wrong_type(scale_name, f"a cache of scales for {pages.dtype} pages", "int8 or float8 pages", remedy=remedy)
        check_array(scale_name, cache)
        shape = PageShape.of((1, *pages.shape), layout)
        check_shape(scale_name, cache, (shape.pages, shape.page_size, shape.heads), "[pages, page_size, K]")
        if new.shape[1] != shape.heads:
            raise invalid(name, f"{new.shape[1]} heads", f"the {shape.heads} of its pages")
        rows[name], scale = quantised(new, pages.dtype)
        scales[name] = scale.astype(cache.dtype)
    updated = OPERATION.invoke(
        {**rows, "key_pages": key_pages, "value_pages": value_pages, **described}, {"layout": layout}, platform=platform
    )
    caches = {"key_pages": k_scale_cache[..., None], "value_pages": v_scale_cache[..., None]}
    written = OPERATION.invoke({**scales, **caches, **described}, {"layout": "pthd"}, platform=platform)
    return (*updated, *(cache[..., 0] for cache in written))


def quantised(rows: Any, dtype: Any) -> tuple[Any, Any]:
    """Rows `[N, K, D]` divided by their scale, float32, and the scales `[N, K, 1]`: the largest magnitude is the dtype's largest.

    A row of zeros, and one that is not finite, has scale 1. Scales are constants under differentiation.
    """
    largest = jnp.finfo(dtype).max if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max
    wide = jax.lax.stop_gradient(rows).astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1, keepdims=True, initial=0) / jnp.asarray(largest, jnp.float32)
    scale = jnp.where((scale > 0) & jnp.isfinite(scale), scale, 1)
    return rows.astype(jnp.float32) / scale, scale
