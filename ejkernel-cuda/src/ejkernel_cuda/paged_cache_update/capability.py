"""Which calls of `paged_cache_update` this kernel runs."""

from __future__ import annotations

from ejkernel.operations.paged_cache_update.interface import PagedCacheUpdateCall
from ejkernel.plugin import Target
from ejkernel.targets.nvidia import FLOATS
from ejkernel_cuda._capability import refusal

STORED = (*FLOATS, "int8", "float8_e4m3fn", "float8_e5m2")
MOST = 2**31 - 1


def supports_forward(call: PagedCacheUpdateCall, target: Target) -> str | None:
    batch, tokens, heads, _ = call.key.shape
    widest = heads * max(call.key.shape[3], call.value.shape[3])
    if widest > MOST:
        return f"{widest} elements of one token are more than {MOST}"
    if batch * tokens > MOST:
        return f"{batch} times {tokens} tokens are more than {MOST}, the blocks of a grid"
    names = dict.fromkeys(("key", "value", "key_pages", "value_pages"), STORED)
    names |= dict.fromkeys(("key_scale", "value_scale"), FLOATS)
    return refusal(target, {name: getattr(call, name) for name in names}, names)
