"""Contract of `paged_attention`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Int32, Num

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, named
from ejkernel.call.random import requests
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common import pages as _pages
from ejkernel.operations.common.options import as_count, as_flag, as_precision, as_soft_cap
from ejkernel.operations.common.pages import FUSED, PageShape
from ejkernel.operations.common.scale import scaled
from ejkernel.operations.flash_attention import bind
from ejkernel.operations.paged_attention.chunks import check_chunks, requests_of_chunks
from ejkernel.operations.paged_attention.first_keys import first_keys_of, traced_limits
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_array, check_compute, check_shape
from ejkernel.utils.tracing import is_traced, traced_count


class PagedAttentionInputs(NamedTuple):
    """Canonical arrays; `1|b` where the batch may share one.

    query `[b, N, H, D]`; key_pages and value_pages `[1|b, ...]` in the call's layout, value_pages None where key_pages hold both;
    query_start_loc int32 `[1|b, R + 1]`; kv_lens int32 `[1|b, R]`; block_tables int32 `[1|b, R, W]`; softmax_aux `[1|b, H, n]`;
    alibi_slopes `[1|b, H]`; qq_bias `[1|b, 1|R, Q, Q]`; key_scale and value_scale float32 `[1|b, 1|K]`; key_token_scale and
    value_token_scale float32 `[1|b, pages, page_size, 1|K]` in every layout, the factor of each stored row; first_keys int32
    `[1|b, N]`, the first key that each token may see.
    """

    query: Float[Array, "b n h d"]
    key_pages: Num[Array, "#b ..."]
    value_pages: Num[Array, "#b ..."]
    query_start_loc: Int32[Array, "#b boundaries"]
    kv_lens: Int32[Array, "#b requests"]
    block_tables: Int32[Array, "#b requests w"]
    softmax_aux: Float[Array, "#b h x"] = None
    alibi_slopes: Float[Array, "#b h"] = None
    qq_bias: Float[Array, "#b #requests q q"] = None
    key_scale: Float32[Array, "#b #k"] = None
    value_scale: Float32[Array, "#b #k"] = None
    key_token_scale: Float32[Array, "#b p s #k"] = None
    value_token_scale: Float32[Array, "#b p s #k"] = None
    first_keys: Int32[Array, "#b n"] = None


class PagedAttentionOutputs(NamedTuple):
    """out `[b, N, H, V]` in the query's dtype; lse float32 `[b, N, H]`, natural log, sinks included, -inf for a row whose
    denominator is empty. lse is public when asked for and a residual otherwise."""

    out: Float[Array, "b n h v"]
    lse: Float32[Array, "b n h"] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedAttentionCall(Call):
    """Static facts.

    Attributes:
        layout: of the pages, a name of `_pages.LAYOUTS`.
        key_heads: the heads in use where fused pages have padding after them; None = all.
        softmax_scale: factor on `query . key`.
        causal: a key is visible up to the query's position.
        window: only the last so many keys up to the query's position are visible; None = all.
        logits_soft_cap: c in `c * tanh(product / c)`, of scaled products.
        precision: of both products: None (full precision of their dtype), or "default", "high", "highest".
        return_lse: lse is a public output.
    """

    query: ArraySpec
    key_pages: ArraySpec
    value_pages: ArraySpec | None = None
    query_start_loc: ArraySpec
    kv_lens: ArraySpec
    block_tables: ArraySpec
    softmax_aux: ArraySpec | None = None
    alibi_slopes: ArraySpec | None = None
    qq_bias: ArraySpec | None = None
    key_scale: ArraySpec | None = None
    value_scale: ArraySpec | None = None
    key_token_scale: ArraySpec | None = None
    value_token_scale: ArraySpec | None = None
    first_keys: ArraySpec | None = None
    layout: str = "pthd"
    key_heads: int | None = None
    softmax_scale: float
    causal: bool = True
    window: int | None = None
    logits_soft_cap: float | None = None
    precision: str | None = None
    return_lse: bool = False

    @property
    def pages(self) -> PageShape:
        return PageShape.of(self.key_pages.shape, self.layout)

    @property
    def heads(self) -> int:
        """K, the key heads in use."""
        return self.pages.heads if self.key_heads is None else self.key_heads

    @property
    def value_size(self) -> int:
        """V."""
        if self.value_pages is None:
            return self.query.shape[3]
        return PageShape.of(self.value_pages.shape, self.layout).head_size

    @property
    def longest(self) -> int:
        """The most keys that a row of the block table can name."""
        return self.block_tables.shape[2] * self.pages.page_size


class PagedAttention(Operation):
    """`L_ij = cap(scale * key_scale * q_i . k_j) + slope * (j - i) + qq_bias`, then `softmax(mask(L), sinks) . v * value_scale`.

    Token t of a request with q new tokens and n keys, those included, is at position `n - q + t`; key j of it is token
    `j % page_size` of page `block_table[j // page_size]`. Keys on pages outside of the cache are not visible.
    """

    name = "paged_attention"
    Call = PagedAttentionCall
    Inputs = PagedAttentionInputs
    Outputs = PagedAttentionOutputs
    revisions = (13, ("key_token_scale", "value_token_scale", "first_keys"))
    renamed = (("scale", "softmax_scale"), ("soft_cap", "logits_soft_cap"), ("sinks", "softmax_aux"))
    differentiable = (
        "query",
        "key_pages",
        "value_pages",
        "softmax_aux",
        "alibi_slopes",
        "qq_bias",
        "key_scale",
        "value_scale",
        "key_token_scale",
        "value_token_scale",
    )
    shardable = ("b", "h")
    traceable = ("softmax_scale", "sliding_window", "chunk_size")

    def canonicalise(
        self,
        query: Any,
        key_pages: Any,
        value_pages: Any = None,
        query_start_loc: Any = None,
        kv_lens: Any = None,
        block_tables: Any = None,
        softmax_aux: Any = None,
        alibi_slopes: Any = None,
        qq_bias: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        first_keys: Any = None,
        *,
        layout: str = "pthd",
        key_heads: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = True,
        sliding_window: Any = None,
        chunk_size: Any = None,
        logits_soft_cap: float | None = None,
        precision: Any = None,
        return_lse: bool = False,
    ) -> Bound:
        """Check and add the batch axis.

        Args:
            query: `[N, H, D]`, the new tokens of all requests one after the other, floating.
            key_pages: as layout says; floating, int8, float8_e4m3fn or float8_e5m2.
            value_pages: the same with head size V; None in layouts that hold both.
            query_start_loc: int `[R + 1]`, cumulative numbers of new tokens; tokens past the last one give 0.
            kv_lens: int `[R]`, keys of each request, its new tokens included.
            block_tables: int `[R, W]`, pages of each request in order; entries beyond need may hold anything.
            softmax_aux: sinks `[H]`, `[H, n]` or `[1, n]`.
            alibi_slopes: `[H]`, floating.
            qq_bias: `[Q, Q]` or `[R, Q, Q]`, floating: bias from new token i to new token j of the same request; -inf hides j.
            k_scale, v_scale: factors of what the pages hold, a scalar, `[K]`, or `[pages, page_size, 1|K]` for each stored row.
            first_keys: int `[N]`: a token sees no key before this one of its request.
            layout: a name of `_pages.LAYOUTS`.
            key_heads: the heads in use where fused pages have padding after them.
            softmax_scale: None means `1 / sqrt(D)`; traced, the query is multiplied by it, see `scaled`.
            sliding_window: w >= 1: the last w keys, the query's own position included. Traced, it becomes part of first_keys, and
                so does chunk_size, which then need not be a multiple of the page size.
            chunk_size: only keys of the query's own chunk of this many positions are visible; a multiple of the page size. The
                call has a request for each chunk in the place of those that are given.
            causal, logits_soft_cap, precision, return_lse: as in `PagedAttentionCall`.
        """
        check_compute("query", query, ndim=3)
        _pages.check_layout(layout)
        key_pages = _pages.canonical_pages("key_pages", key_pages, layout)
        if value_pages is not None:
            value_pages = _pages.canonical_pages("value_pages", value_pages, layout)
        _pages.check_page_pair(key_pages, value_pages, layout)
        shape = PageShape.of(key_pages.shape, layout)
        key_heads = _pages.check_key_heads(key_heads, shape.heads, layout)
        used = shape.heads if key_heads is None else key_heads
        _check_query(query, key_pages.shape, used, layout)
        starts, lengths, tables = _pages.canonical_requests(query_start_loc, kv_lens, block_tables)
        causal = as_flag("causal", causal)
        limits = traced_limits(sliding_window, chunk_size, causal)
        if is_traced(sliding_window):
            sliding_window = None
        if chunk_size is not None and not is_traced(chunk_size):
            chunk_size = as_count("chunk_size", chunk_size, 1)
            check_chunks(chunk_size, shape.page_size, causal, qq_bias)
            described = (starts, lengths, tables, query_start_loc)
            starts, lengths, tables = requests_of_chunks(*described, query.shape[0], shape.page_size, chunk_size)
        heads = query.shape[1]
        query, scale = scaled(query, softmax_scale, query.shape[2])
        key_scale, key_token_scale = _pages.canonical_scales("k_scale", k_scale, used, shape)
        value_scale, value_token_scale = _pages.canonical_scales("v_scale", v_scale, used, shape)
        inputs = PagedAttentionInputs(
            query=query[None],
            key_pages=key_pages,
            value_pages=value_pages,
            query_start_loc=starts,
            kv_lens=lengths,
            block_tables=tables,
            softmax_aux=bind.as_sinks(softmax_aux, heads),
            alibi_slopes=_as_slopes(alibi_slopes, heads),
            qq_bias=_as_qq_bias(qq_bias, lengths.shape[1]),
            key_scale=key_scale,
            value_scale=value_scale,
            key_token_scale=key_token_scale,
            value_token_scale=value_token_scale,
            first_keys=first_keys_of(first_keys, *limits, starts, lengths, query.shape[0]),
        )
        call = PagedAttentionCall(
            **{name: ArraySpec.of(array) for name, array in named(inputs)},  # pyright: ignore[reportArgumentType]
            layout=layout,
            key_heads=key_heads,
            softmax_scale=scale,
            causal=causal,
            window=as_window(sliding_window),
            logits_soft_cap=as_soft_cap(logits_soft_cap),
            precision=as_precision(precision),
            return_lse=as_flag("return_lse", return_lse),
        )

        def finish(outputs: PagedAttentionOutputs) -> Any:
            return (outputs.out[0], outputs.lse[0]) if return_lse else outputs.out[0]

        return Bound(call, inputs, finish)

    def check_values(self, arrays: Mapping[str, Any]) -> None:
        if getattr(arrays.get("query"), "ndim", 0) == 3 and "query_start_loc" in arrays:
            active = arrays.get("num_seqs", arrays.get("distribution"))
            _pages.check_starts("query_start_loc", arrays["query_start_loc"], arrays["query"].shape[0], active)

    def random_inputs(self, call: PagedAttentionCall, rng: np.random.Generator, **given: Any) -> PagedAttentionInputs:
        """A mix of requests that own all tokens and different pages."""
        pages = PageShape.of(call.key_pages.shape, call.layout)
        known = requests(rng, call, call.query.shape[1], pages.pages, pages.page_size)
        if call.first_keys is not None:
            known["first_keys"] = rng.integers(0, call.longest // 2 + 1, call.first_keys.shape, np.int32)
        return super().random_inputs(call, rng, **{**known, **given})

    def dimensions(self, call: PagedAttentionCall) -> Mapping[str, str]:
        pages = call.key_pages.shape
        head, key_head = (_pages.head_factor(call.heads, pages, call.layout, owner) for owner in ("query", "key"))
        return {
            "query": f"b n {head} d",
            "key_pages": _pages.page_dims(pages, call.layout, "b?", key_head, "d"),
            "value_pages": _pages.page_dims(pages, call.layout, "b?", key_head, "v"),
            "query_start_loc": "b? l",
            "kv_lens": "b? r",
            "block_tables": "b? r w",
            "softmax_aux": f"b? {head} x",
            "alibi_slopes": f"b? {head}",
            "qq_bias": "b? r? i j",
            "key_scale": f"b? {key_head}?",
            "value_scale": f"b? {key_head}?",
            "key_token_scale": f"b? p s {key_head}?",
            "value_token_scale": f"b? p s {key_head}?",
            "first_keys": "b? n",
            "out": f"b n {head} v",
            "lse": f"b n {head}",
        }

    def output_specs(self, call: PagedAttentionCall) -> PagedAttentionOutputs:
        rows = call.query.shape[:3]
        out = ArraySpec((*rows, call.value_size), call.query.dtype)
        return PagedAttentionOutputs(out, ArraySpec(rows, "float32") if call.return_lse or call.save_residuals else None)

    def public(self, call: PagedAttentionCall) -> tuple[str, ...]:
        return ("out", "lse") if call.return_lse else ("out",)

    def cost(self, call: PagedAttentionCall, phase: Phase) -> Cost:
        """An upper bound: every request as long as its table allows, its pages read once; the lengths are known at run time."""
        batch, tokens, heads, head_size = call.query.shape
        keys = call.longest if call.window is None else min(call.window, call.longest)
        products = 2 * batch * tokens * heads * keys * (head_size + call.value_size)
        stored = (call.key_pages, call.value_pages, call.key_token_scale, call.value_token_scale)
        pages = [spec for spec in stored if spec is not None]
        read = batch * call.block_tables.shape[1] * keys
        per_key = sum(spec.nbytes // max(spec.shape[0] * call.pages.pages * call.pages.page_size, 1) for spec in pages)
        moved = read * per_key + call.query.nbytes + self.output_specs(call).out.nbytes
        return Cost(products, moved) if phase == "forward" else Cost(products * 5 // 2, 3 * moved)


def _check_query(query: Any, pages: tuple[int, ...], key_heads: int, layout: str) -> None:
    _, heads, head_size = query.shape
    shape, remedy = PageShape.of(pages, layout), ""
    if layout not in FUSED:
        separate = [name for name in _pages.LAYOUTS if name not in FUSED]
        fitting = [name for name in separate if heads and heads % (PageShape.of(pages, name).heads or heads + 1) == 0]
        remedy = f"layout={layout!r} reads the cache as {_pages.LAYOUTS[layout]}"
        remedy += "".join(f"; with layout={name!r} it is {_pages.LAYOUTS[name]}" for name in fitting if name != layout)
    if heads == 0 or key_heads == 0 or heads % key_heads:
        raise invalid("query", f"{heads} heads", f"a multiple of the {key_heads} key heads", remedy=remedy)
    if head_size == 0 or shape.head_size < head_size or (layout not in FUSED and shape.head_size != head_size):
        raise invalid("query", f"head size {head_size}", f"the pages' {shape.head_size}", remedy=remedy)


def _as_slopes(slopes: Any, heads: int) -> Any:
    if slopes is None:
        return None
    check_compute("alibi_slopes", slopes)
    check_shape("alibi_slopes", slopes, (heads,), "[H]")
    return slopes[None]


def _as_qq_bias(bias: Any, requests: int) -> Any:
    if bias is None:
        return None
    check_array("qq_bias", bias)
    shape = tuple(bias.shape)
    if len(shape) not in (2, 3) or shape[-1] != shape[-2] or shape[:-2] not in ((), (1,), (requests,)):
        raise invalid("qq_bias", f"shape {shape}", f"[Q, Q] or [R, Q, Q] with R = {requests} requests")
    if jnp.dtype(bias.dtype).itemsize < 2:
        raise wrong_type("qq_bias", f"dtype {bias.dtype}", "float32, bfloat16 or float16")
    return bias[None] if len(shape) == 3 else bias[None, None]


def as_window(window: Any) -> Any:
    """w >= 1, from an int or a pair `(left, right)`, which means the last `left + 1` keys: none is to the right of a query.

    Of what is traced an int32 scalar.
    """
    if window is None:
        return None
    if isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise invalid("sliding_window", window, "an int or (left, right)")
        left, right = window
        if right is not None and not is_traced(right):
            as_count("sliding_window", right, 0)
        if is_traced(left):
            return jnp.minimum(traced_count("sliding_window", left, 0), 2**31 - 2) + 1
        return None if left is None else as_count("sliding_window", left, 0) + 1
    return traced_count("sliding_window", window, 1) if is_traced(window) else as_count("sliding_window", window, 1)


OPERATION = PagedAttention()
