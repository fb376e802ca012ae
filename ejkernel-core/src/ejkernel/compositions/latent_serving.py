"""One step of serving with latents: store the new ones in the paged cache, then attend."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel._dispatch.explanation import capturing
from ejkernel.call.records import Bound
from ejkernel.errors import argument_names, invalid
from ejkernel.operations.common.options import as_number
from ejkernel.operations.latent_paged_attention.interface import OPERATION as _LATENT_PAGED_ATTENTION
from ejkernel.operations.paged_attention import forms as _paged
from ejkernel.operations.paged_cache_update.interface import OPERATION as _PAGED_CACHE_UPDATE
from ejkernel.utils.checks import check_array, check_compute, check_shape

_LANES = 128
_DESCRIPTION = ("kv_lens", "block_tables", "query_start_loc", "distribution")
"""Arrays that say which tokens and pages are whose."""


def attend_after_storing(arrays: dict[str, Any], options: dict[str, Any], *, platform: Any, cfg: Any) -> tuple[Any, Any]:
    """`multi_latent_ragged_page_attention` with its arguments as `split` gives them."""
    mask_value = options.pop("mask_value")
    if mask_value is not None:
        as_number("mask_value", mask_value)
    _check_tokens(arrays)
    kv_cache, tokens = arrays["kv_cache"], arrays["queries_nope"].shape[0]
    described = {name: arrays[name] for name in _DESCRIPTION}
    _paged.check_distributed(**described, tokens=tokens, page_size=kv_cache.shape[1] * kv_cache.shape[2])
    settings = _paged.settings(**options | {"sliding_window": _paged.window_of(options["sliding_window"])})
    names = ("queries_nope", "queries_pe", "q_scale", "k_scale", "v_scale")
    attended = {**{name: arrays[name] for name in names}, **described}
    with argument_names(query_nope="queries_nope", query_pe="queries_pe", key_pages="kv_cache", pages="kv_cache"):
        updated: Any = kv_cache
        if not capturing():  # an explanation is asked of the attention
            stored = {name: arrays[name] for name in ("kv_cache", "keys_values", "keys_pe", "k_scale")} | described
            updated = _PAGED_CACHE_UPDATE.invoke(stored, {}, form=_store, platform=platform, cfg=_for_update(cfg))
        attended["kv_cache"] = updated
        out = _LATENT_PAGED_ATTENTION.invoke(attended, settings, form=_attend, platform=platform, cfg=cfg)
    return out, updated


def _check_tokens(arrays: dict[str, Any]) -> None:
    """Refuse queries, keys and a cache whose shapes and dtypes do not fit together."""
    queries_nope, queries_pe, keys_values, keys_pe, kv_cache = (
        arrays[name] for name in ("queries_nope", "queries_pe", "keys_values", "keys_pe", "kv_cache")
    )
    for name, array, rank in (("keys_values", keys_values, 2), ("keys_pe", keys_pe, 2), ("kv_cache", kv_cache, 4)):
        check_array(name, array, ndim=rank, floating=False)
    for name, array in (("keys_values", keys_values), ("keys_pe", keys_pe)):
        if array.dtype != kv_cache.dtype:
            check_compute(name, array)
    check_array("queries_nope", queries_nope, ndim=3)
    check_array("queries_pe", queries_pe, ndim=3)
    tokens, heads, _ = queries_nope.shape
    check_shape("queries_pe", queries_pe, (tokens, heads, queries_pe.shape[2]), "[N, H, e] with the N and H of queries_nope")
    check_shape("keys_values", keys_values, (tokens, keys_values.shape[1]), "[N, r] with the N of queries_nope")
    check_shape("keys_pe", keys_pe, (tokens, keys_pe.shape[1]), "[N, e] with the N of queries_nope")


def _for_update(cfg: Any) -> Any:
    """A portable config is for both steps, one of an implementation for the attention alone."""
    return cfg if "paged_cache_update" in getattr(cfg, "operations", ()) else None


def _rounded_up(size: int) -> int:
    return -(-size // _LANES) * _LANES


def _described(
    kv_cache: Any, kv_lens: Any, block_tables: Any, query_start_loc: Any, distribution: Any
) -> tuple[Any, dict[str, Any]]:
    """The cache as `[P, page_size, C]`, and the requests that are in use."""
    pages, groups, packing, channels = kv_cache.shape
    described = _paged.distributed(query_start_loc, kv_lens, block_tables, distribution)
    return kv_cache.reshape(pages, groups * packing, channels), described


def _store(*, kv_cache: Any, keys_values: Any, keys_pe: Any, k_scale: Any = None, **requests: Any) -> Bound:
    """Canonicalise the update of one array of pages: a cache whose values have no channels."""
    size, rotary = keys_values.shape[1], keys_pe.shape[1]
    _check_channels(kv_cache, size, rotary)
    widths = _rounded_up(size) - size, _rounded_up(rotary) - rotary
    parts = [jnp.pad(part, ((0, 0), (0, width))) for part, width in zip((keys_values, keys_pe), widths, strict=True)]
    rows = jnp.concatenate(parts, axis=-1)[:, None]
    pages, described = _described(kv_cache, **requests)
    pages = pages[:, :, None]
    bound = _PAGED_CACHE_UPDATE.canonicalise(
        key=rows, value=rows[..., :0], key_pages=pages, value_pages=pages[..., :0], k_scale=k_scale, **described
    )
    return Bound(bound.call, bound.inputs, lambda outputs: bound.finish(outputs)[0].reshape(kv_cache.shape))


def _attend(
    *,
    kv_cache: Any,
    queries_nope: Any,
    queries_pe: Any,
    kv_lens: Any,
    block_tables: Any,
    query_start_loc: Any,
    distribution: Any,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    **options: Any,
) -> Bound:
    size = queries_nope.shape[2]
    _check_channels(kv_cache, size, queries_pe.shape[2])
    pages, described = _described(kv_cache, kv_lens, block_tables, query_start_loc, distribution)
    if q_scale is not None and jnp.size(q_scale) != 1:
        raise invalid("q_scale", f"shape {jnp.shape(q_scale)}", "a number or a scalar array")
    factors = [jnp.asarray(scale, jnp.float32) for scale in (q_scale, k_scale) if scale is not None]
    return _LATENT_PAGED_ATTENTION.canonicalise(
        queries_nope,
        queries_pe,
        pages,
        **described,
        k_scale=None if not factors else factors[0] if len(factors) == 1 else factors[0] * factors[1],
        v_scale=k_scale if v_scale is None else v_scale,
        pe_offset=_rounded_up(size),
        **options,
    )


def _check_channels(kv_cache: Any, size: int, rotary: int) -> None:
    need = _rounded_up(size), _rounded_up(rotary)
    if kv_cache.shape[3] != sum(need):
        meaning = f"{need[0]} + {need[1]}: latents of {size} and rotary parts of {rotary}, each rounded up to {_LANES}"
        raise invalid("kv_cache", f"{kv_cache.shape[3]} channels", meaning)
