"""Which calls of `paged_attention` these kernels run."""

from __future__ import annotations

from ejkernel.operations.paged_attention.interface import PagedAttentionCall
from ejkernel.plugin import Target
from ejkernel_triton._blocks import MIN_DOT_SIZE
from ejkernel_triton._capability import FLOATS, refusal
from ejkernel_triton._pages import STORED, e4m3_problem

MAX_HEAD_SIZE = 512
"""Largest head size: a program holds a tile's accumulator in registers."""
MAX_PROGRAMS = MAX_ELEMENTS = 2**31 - 1


def supports_forward(call: PagedAttentionCall, target: Target) -> str | None:
    batch, tokens, heads, size = call.query.shape
    widest = max(size, call.value_size)
    if widest > MAX_HEAD_SIZE:
        return f"head size {widest} is above {MAX_HEAD_SIZE}, the widest that one program holds"
    elements = max(spec.size // max(spec.shape[0] * call.pages.pages, 1) for spec in (call.key_pages, call.value_pages) if spec)
    if elements > MAX_ELEMENTS:
        return f"a page of {elements} elements is above {MAX_ELEMENTS}; only pages are counted in 64 bits"
    if batch * heads * (tokens + call.kv_lens.shape[1]) > MAX_PROGRAMS:
        return f"{tokens} tokens of {heads} heads, {batch} times, need more than {MAX_PROGRAMS} programs"
    names: dict[str, tuple[str, ...]] = {"query": FLOATS, "key_pages": STORED, "value_pages": STORED}
    names |= dict.fromkeys(("softmax_aux", "alibi_slopes", "qq_bias", "key_scale", "value_scale"), FLOATS)
    problem = refusal(target, {name: getattr(call, name) for name in names}, names)
    return problem or e4m3_problem(target, call.key_pages)


def supports_backward(call: PagedAttentionCall, target: Target) -> str | None:
    programs = call.query.shape[0] * call.pages.pages * -(-call.pages.page_size // MIN_DOT_SIZE) * call.heads
    if programs > MAX_PROGRAMS:
        return f"{programs} blocks of keys of pages are more programs than {MAX_PROGRAMS}"
    return supports_forward(call, target)
