"""Which calls of `latent_paged_attention` these kernels run."""

from __future__ import annotations

from ejkernel.operations.latent_paged_attention.interface import LatentPagedAttentionCall
from ejkernel.plugin import Target
from ejkernel_triton._blocks import MIN_DOT_SIZE
from ejkernel_triton._capability import FLOATS, refusal
from ejkernel_triton._latents.config import MAX_LATENT, MAX_REST, MAX_SPLITS
from ejkernel_triton._pages import STORED, e4m3_problem

MAX_PROGRAMS = MAX_ELEMENTS = 2**31 - 1


def supports_forward(call: LatentPagedAttentionCall, target: Target) -> str | None:
    batch, tokens, heads, latent = call.query_nope.shape
    if latent > MAX_LATENT:
        return f"latents of {latent} channels are above {MAX_LATENT}, the most that one program holds"
    if call.query_pe.shape[3] > MAX_REST:
        return f"rotary parts of {call.query_pe.shape[3]} channels are above {MAX_REST}, the most that one program holds"
    elements = call.pages.shape[2] * call.pages.shape[3]
    if elements > MAX_ELEMENTS:
        return f"a page of {elements} elements is above {MAX_ELEMENTS}; only pages are counted in 64 bits"
    if batch * heads * (tokens + call.kv_lens.shape[1] + 2) * MAX_SPLITS > MAX_PROGRAMS:
        return f"{tokens} tokens of {heads} heads, {batch} times, need more than {MAX_PROGRAMS} programs"
    names: dict[str, tuple[str, ...]] = {"query_nope": FLOATS, "query_pe": FLOATS, "pages": STORED}
    names |= dict.fromkeys(("key_scale", "value_scale"), FLOATS)
    problem = refusal(target, {name: getattr(call, name) for name in names}, names)
    return problem or e4m3_problem(target, call.pages)


def supports_backward(call: LatentPagedAttentionCall, target: Target) -> str | None:
    programs = call.query_nope.shape[0] * call.pages.shape[1] * -(-call.pages.shape[2] // MIN_DOT_SIZE)
    if programs > MAX_PROGRAMS:
        return f"{programs} blocks of tokens of pages are more programs than {MAX_PROGRAMS}"
    return supports_forward(call, target)
