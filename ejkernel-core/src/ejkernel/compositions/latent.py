"""Latent attention as attention: over projected keys and values, or over the latents themselves, with a projected query."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call.partition import entries_of, explicit_mesh_of, placed_on
from ejkernel.call.records import Bound
from ejkernel.errors import invalid
from ejkernel.operations.common.heads import repeat_heads
from ejkernel.operations.common.options import as_flag, as_precision
from ejkernel.operations.flash_attention.dropout import host_seed
from ejkernel.operations.flash_attention.forms import check_cum_seqlens, packed
from ejkernel.operations.flash_attention.interface import OPERATION as _FLASH_ATTENTION
from ejkernel.utils.checks import check_array, check_compute, check_shape
from ejkernel.utils.dtypes import accumulator, common_dtype


def latent(arrays: dict[str, Any], options: dict[str, Any], **run: Any) -> Any:
    """`flash_mla` with its arguments as `split` gives them."""
    query, cu_seqlens = arrays["query"], arrays["cu_seqlens"]
    if arrays["dropout_seed"] is not None:
        arrays["dropout_seed"] = host_seed(arrays["dropout_seed"])
    if cu_seqlens is not None:
        check_array("query", query, ndim=4)
        check_cum_seqlens("cu_seqlens", cu_seqlens, query.shape[1])
    options["absorbed"] = as_flag("absorbed", options["absorbed"])
    return _FLASH_ATTENTION.invoke(arrays, options, form=_projected, **run)


def _projected(
    query: Any,
    key_value: Any,
    w_kc: Any,
    w_vc: Any,
    b_q: Any = None,
    b_k: Any = None,
    cu_seqlens: Any = None,
    *,
    absorbed: bool,
    softmax_scale: float | None = None,
    precision: Any = None,
    **rest: Any,
) -> Bound:
    """Canonicalise latent attention as `flash_attention`."""
    precision = as_precision(precision)
    query, rotary = _split_query(query, key_value, w_kc, w_vc, b_q, b_k)
    parts = (query.shape[3], 0 if b_k is None else b_k.shape[2])
    scale = 1 / math.sqrt(sum(parts)) if softmax_scale is None else softmax_scale
    if absorbed:
        group = query.shape[2] // w_kc.shape[1]
        query = _product("bthd,rhd->bthr", query, repeat_heads(w_kc, group, axis=1), precision)
        key = value = key_value[:, :, None]
    else:
        key = _product("bsr,rkd->bskd", key_value, w_kc, precision)
        value = _product("bsr,rkv->bskv", key_value, w_vc, precision)
    if b_k is not None:
        query, key = _beside(query, rotary), _beside(key, b_k[:, :, None])
    settings: dict[str, Any] = {"softmax_scale": scale, "precision": precision, **rest}
    if cu_seqlens is None:
        bound = _FLASH_ATTENTION.canonicalise(query, key, value, **settings)
    else:
        bound = packed(query, key, value, cu_seqlens, layout="bthd", **settings)
    if not absorbed:
        return bound

    def finish(outputs: Any) -> Any:
        weights = repeat_heads(w_vc, query.shape[2] // w_vc.shape[1], axis=1)
        return _product("bthr,rhv->bthv", bound.finish(outputs), weights, precision)

    return Bound(bound.call, bound.inputs, finish)


def _split_query(query: Any, key_value: Any, w_kc: Any, w_vc: Any, b_q: Any, b_k: Any) -> tuple[Any, Any]:
    """Check what belongs together and return the two parts of the query, `[B, T, H, d_nope]` and `[B, T, H, d_rope]`."""
    given = {"query": (query, 4), "key_value": (key_value, 3), "w_kc": (w_kc, 3), "w_vc": (w_vc, 3)}
    for name, (array, rank) in given.items():
        check_compute(name, array, ndim=rank)
    batch, queries, heads, _ = query.shape
    rank, key_heads, size = w_kc.shape
    if key_value.shape[0] != batch:
        raise invalid("key_value", f"batch size {key_value.shape[0]}", f"the query's {batch}")
    if key_value.shape[2] != rank:
        raise invalid("w_kc", f"shape {tuple(w_kc.shape)}", f"[r, K, d_nope] with r = {key_value.shape[2]}, the latents' size")
    if w_vc.shape[:2] != (rank, key_heads):
        raise invalid("w_vc", f"shape {tuple(w_vc.shape)}", f"[{rank}, {key_heads}, V] as w_kc")
    if key_heads == 0 or heads % key_heads:
        raise invalid("query", f"{heads} heads", f"a multiple of the {key_heads} heads of w_kc")
    if b_k is None:
        if b_q is not None:
            raise invalid("b_q", "an array", "None without b_k")
        check_shape("query", query, (batch, queries, heads, size), "[B, T, H, d_nope] with the d_nope of w_kc")
        return query, None
    check_array("b_k", b_k, ndim=3)
    rotary_size = b_k.shape[2]
    check_shape("b_k", b_k, (batch, key_value.shape[1], rotary_size), "[B, S, d_rope]")
    if b_q is None:
        check_shape("query", query, (batch, queries, heads, size + rotary_size), "[B, T, H, d_nope + d_rope] without b_q")
        return query[..., :size], query[..., size:]
    check_shape("query", query, (batch, queries, heads, size), "[B, T, H, d_nope] with b_q")
    check_array("b_q", b_q)
    full = (batch, queries, heads, rotary_size)
    if len(b_q.shape) == 3:
        check_shape("b_q", b_q, (batch, queries, rotary_size), "[B, T, d_rope] or [B, T, H, d_rope]")
        return query, b_q[:, :, None]
    check_shape("b_q", b_q, full, "[B, T, H, d_rope] or [B, T, d_rope]")
    return query, b_q


def _beside(array: Any, rotary: Any) -> Any:
    """Heads `[B, T, H, d]` with their rotary parts, which they may share, behind them; split over a mesh as the heads are."""
    rotary = jnp.broadcast_to(rotary, (*array.shape[:3], rotary.shape[3]))
    mesh = explicit_mesh_of((array, rotary))
    if mesh is not None:
        rotary = placed_on(mesh, rotary, (*entries_of(array)[:3], ()))
    return jnp.concatenate([array, rotary], axis=-1)


def _product(equation: str, first: Any, second: Any, precision: Any) -> Any:
    """In the first array's dtype, summed in float32 at least; float32 products stay float32."""
    dtype = common_dtype(first.dtype, second.dtype)
    wide = accumulator(dtype)
    precision = jax.lax.Precision.HIGHEST if precision is None and dtype.itemsize >= 4 else precision
    return jnp.einsum(equation, first, second, precision=precision, preferred_element_type=wide).astype(first.dtype)
