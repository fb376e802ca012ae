"""Which calls of `paged_attention` this kernel runs."""

from __future__ import annotations

from ejkernel.operations.common.pages import FUSED, PageStrides
from ejkernel.operations.paged_attention.interface import PagedAttentionCall
from ejkernel.plugin import Target
from ejkernel_cuda._capability import TMA_ELEMENTS, refusal
from ejkernel_cuda.flash_attention.capability import CAPABILITY, DTYPES, MOST_BLOCKS, MOST_TOKENS, WIDEST
from ejkernel_cuda.paged_attention.capability import MOST_KEYS

PAGE_MULTIPLE = 8
"""Tokens of the smallest TMA box."""
_LARGE, _SMALL = 1e30, 1e-30


def supports_forward(call: PagedAttentionCall, target: Target) -> str | None:
    if target.backend == "gpu" and target.capability is not None and target.capability != CAPABILITY:
        return f"needs compute capability 9.0 (Hopper), {target} has {target.compute_capability}"
    specs = {name: getattr(call, name) for name in ("query", "key_pages", "value_pages")}
    return _contents_refusal(call) or _size_refusal(call) or refusal(target, specs, DTYPES)


def _contents_refusal(call: PagedAttentionCall) -> str | None:
    if call.key_pages.dtype != call.query.dtype:
        return f"pages of {call.key_pages.dtype} with queries of {call.query.dtype}, this kernel needs one dtype"
    if abs(call.softmax_scale) > _LARGE:
        return f"scale {call.softmax_scale:g} is beyond {_LARGE:g}"
    if call.logits_soft_cap is not None and call.query.dtype == "float16":
        return f"logits_soft_cap is {call.logits_soft_cap} with float16, the kernel's tanh is only as accurate as bfloat16"
    if call.logits_soft_cap is not None and not _SMALL <= call.logits_soft_cap <= _LARGE:
        return f"soft_cap {call.logits_soft_cap:g} is not within {_SMALL:g} ... {_LARGE:g}"
    return None


def _size_refusal(call: PagedAttentionCall) -> str | None:
    batch, tokens, heads, size = call.query.shape
    if not (0 < size <= WIDEST and 0 < call.value_size <= WIDEST):
        return f"heads of {size} and {call.value_size} elements, needs 1 ... {WIDEST}"
    pages, requests = call.pages, call.kv_lens.shape[1]
    if pages.page_size % PAGE_MULTIPLE or not pages.page_size or not pages.pages:
        return f"{pages.pages} pages of {pages.page_size} tokens, needs some whose tokens are a multiple of {PAGE_MULTIPLE}"
    arrays = [call.key_pages] if call.value_pages is None else [call.key_pages, call.value_pages]
    strides = [PageStrides.of(array.shape, call.layout) for array in arrays]
    if any(value % TMA_ELEMENTS for one in strides for value in one):
        kind = "fused pages" if call.layout in FUSED else "pages"
        return f"heads of {kind} {pages.head_size} elements wide, TMA needs a multiple of {TMA_ELEMENTS}"
    if call.longest > MOST_KEYS or tokens > MOST_TOKENS:
        return f"tables name up to {call.longest} keys for {tokens} tokens, needs at most {MOST_KEYS} and {MOST_TOKENS}"
    blocks = batch * heads * (tokens + requests + 2)
    if blocks > MOST_BLOCKS:
        return f"{batch} x {heads} heads of {tokens} tokens, {requests} requests, may need {blocks} blocks, more than {MOST_BLOCKS}"
    return None
