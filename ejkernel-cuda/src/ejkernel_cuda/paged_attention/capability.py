"""Which calls of `paged_attention` these kernels run."""

from __future__ import annotations

from ejkernel.operations.paged_attention.interface import PagedAttentionCall
from ejkernel.plugin import Target
from ejkernel.targets.nvidia import FLOATS
from ejkernel_cuda._capability import refusal, shared_memory_limit
from ejkernel_cuda.paged_attention import config

QUERIES = ("bfloat16", "float16")
ONE_BYTE = ("int8", "float8_e4m3fn", "float8_e5m2")
WIDEST = 256
MOST_KEYS = 2**30
MOST = 2**31 - 1
MOST_TOKENS = 4
"""New tokens per request on average: the kernel reads a request's keys again for each."""
_LARGE, _SMALL = 1e30, 1e-30


def supports_forward(call: PagedAttentionCall, target: Target) -> str | None:
    names: dict[str, tuple[str, ...]] = {"query": QUERIES}
    names |= dict.fromkeys(("key_pages", "value_pages"), (call.query.dtype, *ONE_BYTE))
    names |= dict.fromkeys(("softmax_aux", "key_scale", "value_scale"), FLOATS)
    problem = refusal(target, {name: getattr(call, name) for name in names}, names)
    return problem or _contents_problem(call) or _size_problem(call) or _room_problem(call, target)


def _contents_problem(call: PagedAttentionCall) -> str | None:
    for name in ("alibi_slopes", "qq_bias"):
        if getattr(call, name) is not None:
            return f"{name} is not read by this kernel"
    if abs(call.softmax_scale) > _LARGE:
        return f"scale {call.softmax_scale:g} is beyond {_LARGE:g}"
    if call.logits_soft_cap is not None and not _SMALL <= call.logits_soft_cap <= _LARGE:
        return f"soft_cap {call.logits_soft_cap:g} is not within {_SMALL:g} ... {_LARGE:g}"
    tokens, requests = call.query.shape[1], call.kv_lens.shape[1]
    if tokens > MOST_TOKENS * max(requests, 1):
        return f"{tokens} new tokens of {requests} requests are more than {MOST_TOKENS} each; this kernel is for decoding"
    return None


def _size_problem(call: PagedAttentionCall) -> str | None:
    widest = max(call.query.shape[3], call.value_size)
    if widest > WIDEST or call.value_size == 0:
        return f"heads of {call.query.shape[3]} and {call.value_size} elements, needs 1 ... {WIDEST}"
    if call.longest > MOST_KEYS or call.pages.pages > MOST:
        return f"tables name up to {call.longest} keys in {call.pages.pages} pages, needs at most {MOST_KEYS} and {MOST}"
    batch, tokens, heads, _ = call.query.shape
    if max(config.max_steps(call), batch * tokens * heads, 2 * batch * call.kv_lens.shape[1]) > MOST:
        return f"{tokens} tokens of {heads} heads, {batch} times, with {call.longest} keys each need more than 32 bits to count"
    return None


def _room_problem(call: PagedAttentionCall, target: Target) -> str | None:
    needed, room = config.min_shared_bytes(call), shared_memory_limit(target)
    if needed > room:
        return f"heads this wide need {needed // 1024} KiB of shared memory, {target} has {room // 1024}"
    return None
