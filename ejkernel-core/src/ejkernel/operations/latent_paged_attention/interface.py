"""Contract of `latent_paged_attention`."""

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
from ejkernel.operations.common.scale import scaled
from ejkernel.operations.paged_attention.first_keys import first_keys_of, traced_limits
from ejkernel.operations.paged_attention.interface import as_window
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_array, check_compute, check_shape
from ejkernel.utils.tracing import is_traced


class LatentPagedAttentionInputs(NamedTuple):
    """Canonical arrays; `1|b` where the batch may share one.

    query_nope `[b, N, H, r]`, multiplied with the latents; query_pe `[b, N, H, e]`, with the rotary parts; pages
    `[1|b, P, page_size, C]`: of every token the latent in the channels `:r` and the rotary part in `pe_offset : pe_offset + e`,
    finite numbers in the others; query_start_loc int32 `[1|b, R + 1]`; kv_lens int32 `[1|b, R]`; block_tables int32 `[1|b, R, W]`;
    key_scale and value_scale float32 `[1|b, 1]`; first_keys int32 `[1|b, N]`, the first key that each token may see.
    """

    query_nope: Float[Array, "b n h r"]
    query_pe: Float[Array, "b n h e"]
    pages: Num[Array, "#b p page_size c"]
    query_start_loc: Int32[Array, "#b boundaries"]
    kv_lens: Int32[Array, "#b requests"]
    block_tables: Int32[Array, "#b requests w"]
    key_scale: Float32[Array, "#b 1"] = None
    value_scale: Float32[Array, "#b 1"] = None
    first_keys: Int32[Array, "#b n"] = None


class LatentPagedAttentionOutputs(NamedTuple):
    """out `[b, N, H, r]` in the query's dtype; lse float32 `[b, N, H]`, natural log, -inf for a row that sees no key. lse is public
    when asked for and a residual otherwise."""

    out: Float[Array, "b n h r"]
    lse: Float32[Array, "b n h"] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentPagedAttentionCall(Call):
    """Static facts.

    Attributes:
        pe_offset: the first channel of the rotary part in the pages.
        softmax_scale: factor on the products.
        window: only the last so many keys up to the query's position are visible; None = all.
        logits_soft_cap: c in `c * tanh(product / c)`, of scaled products.
        precision: of the products: None (full precision of their dtype), or "default", "high", "highest".
        return_lse: lse is a public output.
    """

    query_nope: ArraySpec
    query_pe: ArraySpec
    pages: ArraySpec
    query_start_loc: ArraySpec
    kv_lens: ArraySpec
    block_tables: ArraySpec
    key_scale: ArraySpec | None = None
    value_scale: ArraySpec | None = None
    first_keys: ArraySpec | None = None
    pe_offset: int
    softmax_scale: float
    window: int | None = None
    logits_soft_cap: float | None = None
    precision: str | None = None
    return_lse: bool = False


class LatentPagedAttention(Operation):
    """`L_ij = cap(scale * key_scale * (q_nope_i . c_j + q_pe_i . k_pe_j))`, then `softmax(causal(L)) . c * value_scale`.

    Requests and their pages as in `paged_attention`; all heads read the same latents.
    """

    name = "latent_paged_attention"
    Call = LatentPagedAttentionCall
    Inputs = LatentPagedAttentionInputs
    Outputs = LatentPagedAttentionOutputs
    revisions = (6, ("first_keys",))
    renamed = (("scale", "softmax_scale"), ("soft_cap", "logits_soft_cap"))
    differentiable = ("query_nope", "query_pe", "pages", "key_scale", "value_scale")
    shardable = ("b", "h")
    traceable = ("softmax_scale", "sliding_window")

    def canonicalise(
        self,
        query_nope: Any,
        query_pe: Any,
        pages: Any,
        query_start_loc: Any,
        kv_lens: Any,
        block_tables: Any,
        k_scale: Any = None,
        v_scale: Any = None,
        first_keys: Any = None,
        *,
        pe_offset: int | None = None,
        softmax_scale: float | None = None,
        sliding_window: Any = None,
        logits_soft_cap: float | None = None,
        precision: Any = None,
        return_lse: bool = False,
    ) -> Bound:
        """Check and add the batch axis.

        Args:
            query_nope: `[N, H, r]`, the new tokens of all requests one after the other, floating.
            query_pe: `[N, H, e]` in the same dtype.
            pages: `[P, page_size, C]`; floating, int8, float8_e4m3fn or float8_e5m2.
            query_start_loc: int `[R + 1]`, cumulative numbers of new tokens; tokens past the last one give 0.
            kv_lens: int `[R]`, keys of each request, its new tokens included.
            block_tables: int `[R, W]`, pages of each request in order; entries beyond need may hold anything.
            k_scale, v_scale: factors of what the pages hold, scalars: in the logits, and in the output.
            first_keys: int `[N]`: a token sees no key before this one of its request.
            pe_offset: the first channel of the rotary part; None means r.
            softmax_scale: None means `1 / sqrt(r + e)`.
            sliding_window: w >= 1: the last w keys, the query's own position included. Traced, it becomes part of first_keys.
            logits_soft_cap, precision, return_lse: as in `LatentPagedAttentionCall`.
        """
        check_compute("query_nope", query_nope, ndim=3)
        check_compute("query_pe", query_pe, ndim=3)
        tokens, heads, size = query_nope.shape
        check_shape("query_pe", query_pe, (tokens, heads, query_pe.shape[2]), "[N, H, e] with the N and H of query_nope")
        if query_pe.dtype != query_nope.dtype:
            raise wrong_type("query_pe", f"dtype {query_pe.dtype}", f"that of query_nope, {query_nope.dtype}")
        check_array("pages", pages, ndim=3, floating=False)
        pages = _pages.canonical_pages("pages", pages[:, :, None], "pthd")[..., 0, :]
        offset = size if pe_offset is None else as_count("pe_offset", pe_offset, size)
        if min(heads, size) == 0 or pages.shape[3] < offset + query_pe.shape[2]:
            need = f"at least {offset + query_pe.shape[2]}: latents of {size} and rotary parts of {query_pe.shape[2]}"
            raise invalid("pages", f"{pages.shape[3]} channels for {heads} heads", need)
        starts, lengths, tables = _pages.canonical_requests(query_start_loc, kv_lens, block_tables)
        limits = traced_limits(sliding_window, None, True)
        query_nope, scale = scaled(query_nope, softmax_scale, size + query_pe.shape[2])
        query_pe, _ = scaled(query_pe, softmax_scale, size + query_pe.shape[2])
        inputs = LatentPagedAttentionInputs(
            query_nope=query_nope[None],
            query_pe=query_pe[None],
            pages=pages,
            query_start_loc=starts,
            kv_lens=lengths,
            block_tables=tables,
            key_scale=_pages.canonical_page_scale("k_scale", k_scale, 1),
            value_scale=_pages.canonical_page_scale("v_scale", v_scale, 1),
            first_keys=first_keys_of(first_keys, *limits, starts, lengths, tokens),
        )
        call = LatentPagedAttentionCall(
            **{name: ArraySpec.of(array) for name, array in named(inputs)},  # pyright: ignore[reportArgumentType]
            pe_offset=offset,
            softmax_scale=scale,
            window=None if is_traced(sliding_window) else as_window(sliding_window),
            logits_soft_cap=as_soft_cap(logits_soft_cap),
            precision=as_precision(precision),
            return_lse=as_flag("return_lse", return_lse),
        )

        def finish(outputs: LatentPagedAttentionOutputs) -> Any:
            return (outputs.out[0], outputs.lse[0]) if return_lse else outputs.out[0]

        return Bound(call, inputs, finish)

    def random_inputs(
        self, call: LatentPagedAttentionCall, rng: np.random.Generator, **given: Any
    ) -> LatentPagedAttentionInputs:
        """A mix of requests that own all tokens and different pages."""
        known = requests(rng, call, call.query_nope.shape[1], *call.pages.shape[1:3])
        if call.first_keys is not None:
            most = call.block_tables.shape[2] * call.pages.shape[2] // 2 + 1
            known["first_keys"] = rng.integers(0, most, call.first_keys.shape, np.int32)
        return super().random_inputs(call, rng, **{**known, **given})

    def dimensions(self, call: LatentPagedAttentionCall) -> Mapping[str, str]:
        return {
            "query_nope": "b n h r",
            "query_pe": "b n h e",
            "pages": "b? p s c",
            "query_start_loc": "b? l",
            "kv_lens": "b? k",
            "block_tables": "b? k w",
            "key_scale": "b? o",
            "value_scale": "b? o",
            "first_keys": "b? n",
            "out": "b n h r",
            "lse": "b n h",
        }

    def output_specs(self, call: LatentPagedAttentionCall) -> LatentPagedAttentionOutputs:
        wanted = call.return_lse or call.save_residuals
        return LatentPagedAttentionOutputs(call.query_nope, ArraySpec(call.query_nope.shape[:3], "float32") if wanted else None)

    def public(self, call: LatentPagedAttentionCall) -> tuple[str, ...]:
        return ("out", "lse") if call.return_lse else ("out",)

    def cost(self, call: LatentPagedAttentionCall, phase: Phase) -> Cost:
        """An upper bound: every request as long as its table allows, its pages read once; the lengths are known at run time."""
        batch, tokens, heads, size = call.query_nope.shape
        requests, entries = call.block_tables.shape[1:]
        keys = entries * call.pages.shape[2] if call.window is None else min(call.window, entries * call.pages.shape[2])
        products = 2 * batch * tokens * heads * keys * (2 * size + call.query_pe.shape[3])
        per_key = call.pages.shape[3] * jnp.dtype(call.pages.dtype).itemsize
        moved = batch * requests * keys * per_key + 2 * call.query_nope.nbytes + call.query_pe.nbytes
        return Cost(products, moved) if phase == "forward" else Cost(products * 5 // 2, 3 * moved)


OPERATION = LatentPagedAttention()
