"""Which calls of `paged_cache_update` this kernel runs."""

from __future__ import annotations

from ejkernel.operations.paged_cache_update.interface import PagedCacheUpdateCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import FLOATS, refusal
from ejkernel_triton._pages import STORED, e4m3_problem

MAX_HEAD_SIZE = 8192
"""A program holds a head of a token."""
MAX_PROGRAMS = 2**31 - 1


def supports_forward(call: PagedCacheUpdateCall, target: Target) -> str | None:
    batch, tokens, heads, size = call.key.shape
    widest = max(size, call.value.shape[3])
    if widest > MAX_HEAD_SIZE:
        return f"head size {widest} is above {MAX_HEAD_SIZE}, the widest that one program holds"
    if batch * tokens * heads > MAX_PROGRAMS:
        return f"{tokens} tokens of {heads} heads, {batch} times, need more than {MAX_PROGRAMS} programs"
    names = dict.fromkeys(("key", "value", "key_pages", "value_pages"), STORED)
    names |= dict.fromkeys(("key_scale", "value_scale"), FLOATS)
    problem = refusal(target, {name: getattr(call, name) for name in names}, names)
    return problem or e4m3_problem(target, call.key_pages, call.key, call.value)


supports_backward = supports_forward
