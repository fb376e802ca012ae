"""Which calls of `flash_attention` these kernels run."""

from __future__ import annotations

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.plugin import Target
from ejkernel_pallas.mosaic_gpu._device import refusal
from ejkernel_pallas.mosaic_gpu.flash_attention.config import SIZES

MAX_TOKENS = 2**27
MAX_OFFSET = 2**29
"""Positions are 32-bit."""
MAX_BLOCKS = 2**30


def supports_forward(call: FlashAttentionCall, target: Target) -> str | None:
    return _refusal(call, target)


def supports_backward(call: FlashAttentionCall, target: Target) -> str | None:
    return _refusal(call, target)


def _refusal(call: FlashAttentionCall, target: Target) -> str | None:
    specs = {name: getattr(call, name) for name in ("query", "key", "value")}
    return refusal(target, specs) or _feature_refusal(call) or _size_refusal(call)


def _feature_refusal(call: FlashAttentionCall) -> str | None:
    if not call.normalize_output:
        return "normalize_output=False: the gradient needs each row's maximum logit, which is not saved"
    if call.softmax_aux is not None and call.softmax_aux.dtype not in ("float32", "bfloat16", "float16"):
        return f"sinks are {call.softmax_aux.dtype}, needs float32, bfloat16 or float16"
    return None


def _size_refusal(call: FlashAttentionCall) -> str | None:
    batch, queries, heads, size = call.query.shape
    keys, value_size = call.value.shape[1], call.value.shape[3]
    for name, width in (("query", size), ("value", value_size)):
        if not 0 < width <= SIZES[-1]:
            return f"the {name}'s head size is {width}, needs 1 ... {SIZES[-1]}"
    if heads == 0:
        return f"query has shape {call.query.shape}, needs heads"
    if max(queries, keys) > MAX_TOKENS:
        return f"{max(queries, keys)} tokens are more than {MAX_TOKENS}"
    if abs(call.query_offset) > MAX_OFFSET:
        return f"query_offset {call.query_offset} is beyond {MAX_OFFSET}"
    blocks = batch * heads * -(-max(queries, keys) // 64)
    if blocks > MAX_BLOCKS:
        return f"{batch} x {heads} heads of {max(queries, keys)} tokens may need {blocks} blocks, more than {MAX_BLOCKS}"
    return None
