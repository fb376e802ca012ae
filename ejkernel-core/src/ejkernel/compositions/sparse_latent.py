"""Latent attention over the tokens that an indexer chooses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ejkernel._dispatch.explanation import capturing
from ejkernel.compositions.mesh import over_mesh, with_rows
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.options import as_count, as_flag, as_number
from ejkernel.operations.common.pages import check_row_lengths
from ejkernel.operations.common.scale import as_scale, scaled
from ejkernel.operations.lightning_indexer.interface import FLOAT8, OPERATION as _INDEXER
from ejkernel.operations.sparse_latent_attention.interface import OPERATION as _SPARSE_LATENT
from ejkernel.utils.checks import check_array, check_compute, check_shape
from ejkernel.utils.dtypes import accumulator
from ejkernel.utils.tracing import is_traced

_POSITIONAL = ("query", "key_value", "w_kc", "w_vc", "query_index", "key_index", "index_weights", "b_q", "b_k")
"""Arrays in the order of in_specs, but for kv_lens."""


def sparse_latent(arrays: dict[str, Any], options: dict[str, Any], *, in_specs: Any, **run: Any) -> Any:
    """`deepseek_attn` with its arguments as `split` gives them."""
    _check(arrays)
    index_scale = options.pop("index_softmax_scale")
    if index_scale is not None and not is_traced(index_scale):  # a positive factor chooses the same tokens
        index_scale = as_number("index_softmax_scale", index_scale)
        if index_scale <= 0:
            raise invalid("index_softmax_scale", index_scale, "a value > 0")
    options["index_topk"] = min(as_count("index_topk", options["index_topk"], 1), arrays["key_value"].shape[1])
    if not is_traced(options["softmax_scale"]):
        options["softmax_scale"] = as_scale(options["softmax_scale"], _head_size(arrays["w_kc"], arrays["b_k"]))
    options["causal"] = as_flag("causal", options["causal"])
    if arrays["kv_lens"] is not None:
        in_specs = with_rows(in_specs, _POSITIONAL)
    positional = (*_POSITIONAL, "kv_lens")
    return over_mesh(_attend, arrays, options, positional=positional, derived=_with_the_rows, in_specs=in_specs, **run)


def _with_the_rows(_: Any, specs: Any) -> dict[str, P]:
    """Scales of keys are split as the rows of query are."""
    return {"key_index_scale": P((*specs["query"], None)[0])}


def _head_size(w_kc: Any, b_k: Any) -> int:
    """Channels of a query and a key, the rotary part included."""
    return w_kc.shape[2] + (0 if b_k is None else b_k.shape[2])


def _attend(
    *,
    query: Any,
    key_value: Any,
    w_kc: Any,
    w_vc: Any,
    query_index: Any,
    key_index: Any,
    index_weights: Any,
    b_q: Any,
    b_k: Any,
    kv_lens: Any,
    key_index_scale: Any,
    index_topk: int,
    softmax_scale: Any,
    causal: bool,
    platform: Any,
    cfg: Any,
) -> Any:
    """The operation between two products, on checked arguments."""
    size = _head_size(w_kc, b_k)
    options = {"value_size": key_value.shape[2], "softmax_scale": as_scale(None, size), "is_distinct": True}
    if capturing():
        # Nothing is computed while a call is explained, so that its arrays may be shapes alone.
        rope = 0 if b_k is None else b_k.shape[2]
        latent = (key_value.shape[2] + rope,)
        read = index_topk if kv_lens is not None and query.shape[1] == 1 else key_value.shape[1]
        shapes = {"query": (*query.shape[:3], *latent), "key_value": (key_value.shape[0], read, *latent)}
        described = {name: jax.ShapeDtypeStruct(shape, query.dtype) for name, shape in shapes.items()}
        described["token_indices"] = jax.ShapeDtypeStruct((*query.shape[:2], index_topk), jnp.int32)
        return _SPARSE_LATENT.invoke(described, options, platform=platform, cfg=cfg)
    indexer = {
        "query": query_index,
        "key": key_index,
        "weights": index_weights,
        "kv_lens": kv_lens,
        "key_scale": key_index_scale,
    }
    tokens = _INDEXER.invoke(indexer, {"k": index_topk, "causal": causal}, platform=platform)
    if kv_lens is not None and query.shape[1] == 1:
        key_value, b_k, tokens = _read(key_value, b_k, tokens)
    latent_query, latents = _absorbed(query, key_value, w_kc, b_q, b_k)
    latent_query, options["softmax_scale"] = scaled(latent_query, softmax_scale, size)
    arrays = {"query": latent_query, "key_value": latents, "token_indices": tokens}
    out = _SPARSE_LATENT.invoke(arrays, options, platform=platform, cfg=cfg)
    return _per_key_head("btkgr,rkv->btkgv", out, w_vc)


def _read(key_value: Any, b_k: Any, tokens: Any) -> tuple[Any, Any, Any]:
    """The chosen rows of a cache `[B,k,...]` for its one query, and their numbers among themselves."""

    def rows(array: Any) -> Any:
        return jnp.take_along_axis(array, jnp.maximum(tokens[:, 0], 0)[..., None], axis=1)

    numbers = jnp.arange(tokens.shape[2], dtype=jnp.int32)[None, None]
    return rows(key_value), None if b_k is None else rows(b_k), jnp.where(tokens >= 0, numbers, -1)


def _absorbed(query: Any, key_value: Any, w_kc: Any, b_q: Any, b_k: Any) -> tuple[Any, Any]:
    """Queries against latents `[B,T,H,r + d_rope]`, and what they are multiplied with `[B,T,r + d_rope]`."""
    size = w_kc.shape[2]
    latent = _per_key_head("btkgd,rkd->btkgr", query[..., :size], w_kc)
    if b_k is None:
        return latent, key_value
    rope = query[..., size:] if b_q is None else b_q
    # A sum, since it is split over devices as the heads are, which a broadcast would not be.
    rope = rope if rope.ndim == 4 else rope[:, :, None] + jnp.zeros_like(latent[..., :1])
    return jnp.concatenate([latent, rope], axis=-1), jnp.concatenate([key_value, b_k], axis=-1)


def _per_key_head(equation: str, x: Any, weight: Any) -> Any:
    """A product of `[B,T,H,a]` with the matrices of the key heads, in x's dtype."""
    batch, length, heads, size = x.shape
    grouped = x.reshape(batch, length, weight.shape[1], heads // weight.shape[1], size)
    wide = accumulator(x.dtype)
    precision = jax.lax.Precision.HIGHEST if wide == x.dtype else jax.lax.Precision.DEFAULT
    product = jnp.einsum(equation, grouped, weight, precision=precision, preferred_element_type=wide)
    return product.reshape(batch, length, heads, product.shape[-1]).astype(x.dtype)


def _check(arrays: dict[str, Any]) -> None:
    for name, rank in zip(_POSITIONAL[:7], (4, 3, 3, 3, 4, 3, 3), strict=True):
        stored = name in ("query_index", "key_index") and getattr(arrays[name], "dtype", None) == FLOAT8
        (check_array if stored else check_compute)(name, arrays[name], ndim=rank)
    query, b_q, b_k = arrays["query"], arrays["b_q"], arrays["b_k"]
    batch, length, heads, size = query.shape
    rank, key_heads, nope = arrays["w_kc"].shape
    index_heads, index_size = arrays["query_index"].shape[2:]
    if index_size == 0:
        raise invalid("query_index", "0 channels", "at least one")
    tokens, keys = length, "T"
    if (kv_lens := arrays["kv_lens"]) is not None:
        tokens, keys = arrays["key_value"].shape[1], "S"
        check_row_lengths(kv_lens, query, arrays["key_value"], "key_value")
    for name in ("key_value", "w_kc", "w_vc", "b_q", "b_k"):
        if arrays[name] is not None and arrays[name].dtype != query.dtype:
            raise wrong_type(name, f"dtype {arrays[name].dtype}", f"the query's dtype {query.dtype}", remedy="cast one of them")
    if arrays["key_index"].dtype != arrays["query_index"].dtype:
        raise wrong_type("key_index", f"dtype {arrays['key_index'].dtype}", f"query_index's {arrays['query_index'].dtype}")
    if not key_heads or not heads or heads % key_heads:
        raise invalid("query", f"{heads} heads", f"a multiple of the {key_heads} key heads of w_kc")
    check_shape("key_value", arrays["key_value"], (batch, tokens, rank), f"[B,{keys},r], r as in w_kc")
    check_shape("w_vc", arrays["w_vc"], (rank, key_heads, arrays["w_vc"].shape[2]), "[r,K,V], r and K as in w_kc")
    check_shape("query_index", arrays["query_index"], (batch, length, index_heads, index_size), "[B,T,I,E]")
    check_shape("key_index", arrays["key_index"], (batch, tokens, index_size), f"[B,{keys},E]")
    check_shape("index_weights", arrays["index_weights"], (batch, length, index_heads), "[B,T,I]")
    if arrays["key_index_scale"] is not None:
        check_compute("key_index_scale", arrays["key_index_scale"], ndim=2)
        check_shape("key_index_scale", arrays["key_index_scale"], (batch, tokens), f"[B,{keys}]")
    rope = 0
    if b_k is not None:
        check_compute("b_k", b_k, ndim=3)
        rope = b_k.shape[2]
        check_shape("b_k", b_k, (batch, tokens, rope), f"[B,{keys},d_rope]")
    if b_q is not None:
        if b_k is None:
            raise invalid("b_k", None, "the keys' rope part beside b_q")
        check_compute("b_q", b_q)
        expected = (batch, length, rope) if b_q.ndim == 3 else (batch, length, heads, rope)
        check_shape("b_q", b_q, expected, "[B,T,d_rope] or [B,T,H,d_rope]")
    inside = rope if b_q is None else 0
    if size != nope + inside:
        parts = f"the {nope} channels of w_kc" + (f" and {inside} of b_k" if inside else "")
        raise invalid("query", f"head size {size}", f"{nope + inside}: {parts}")
