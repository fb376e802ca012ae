"""Which calls of `flash_attention` this kernel runs."""

from __future__ import annotations

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.plugin import Target
from ejkernel_cuda._capability import refusal

CAPABILITY = (9, 0)
"""wgmma needs sm_90a."""
DTYPES = ("bfloat16", "float16")
WIDEST = 256
MOST_TOKENS = 2**27
FARTHEST_OFFSET = 2**29
"""Positions are counted in 32 bits."""
MOST_BLOCKS = 2**30


def supports_forward(call: FlashAttentionCall, target: Target) -> str | None:
    if target.backend == "gpu" and target.capability is not None and target.capability != CAPABILITY:
        return f"needs compute capability 9.0 (Hopper), {target} has {target.compute_capability}"
    specs = {name: getattr(call, name) for name in ("query", "key", "value")}
    return _feature_refusal(call) or _size_refusal(call) or refusal(target, specs, DTYPES)


def _feature_refusal(call: FlashAttentionCall) -> str | None:
    if call.causal and call.prefix:
        return f"prefix is {call.prefix}, the kernel has none"
    if call.logits_soft_cap is not None and call.query.dtype == "float16":
        return f"logits_soft_cap is {call.logits_soft_cap} with float16, the kernel's tanh is only as accurate as bfloat16"
    return None


def _size_refusal(call: FlashAttentionCall) -> str | None:
    batch, queries, heads, size = call.query.shape
    keys, value_size = call.value.shape[1], call.value.shape[3]
    for name, width in (("query", size), ("value", value_size)):
        if not 0 < width <= WIDEST:
            return f"the {name}'s head size is {width}, needs 1 ... {WIDEST}"
    if max(queries, keys) > MOST_TOKENS:
        return f"{max(queries, keys)} tokens are more than {MOST_TOKENS}"
    if abs(call.query_offset) > FARTHEST_OFFSET:
        return f"query_offset {call.query_offset} is beyond {FARTHEST_OFFSET}"
    blocks = batch * heads * -(-queries // 64)
    if blocks > MOST_BLOCKS:
        return f"{batch} x {heads} heads of {queries} tokens may need {blocks} blocks, more than {MOST_BLOCKS}"
    return None
