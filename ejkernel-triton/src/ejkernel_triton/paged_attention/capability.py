"""Which calls of `paged_attention` these kernels run."""

from __future__ import annotations

from ejkernel.operations.paged_attention.interface import PagedAttentionCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import FLOATS, refusal

STORED = (*FLOATS, "int8", "float8_e4m3fn", "float8_e5m2")
WIDEST = 512
"""A program holds a tile's weighted values in registers."""
E4M3_SINCE = (8, 9)
MOST_PROGRAMS = 2**31 - 1


def supports_forward(call: PagedAttentionCall, target: Target) -> str | None:
    _, _, heads, size = call.query.shape
    widest = max(size, call.value_size)
    if widest > WIDEST:
        return f"head size {widest} is above {WIDEST}, the widest that one program holds"
    if call.key_pages.dtype == "float8_e4m3fn" and (target.capability or E4M3_SINCE) < E4M3_SINCE:
        return f"Triton has no float8_e4m3fn below compute capability 8.9, {target} has {target.compute_capability}"
    if heads * call.query.shape[0] * (call.query.shape[1] + call.kv_lens.shape[1]) > MOST_PROGRAMS:
        return f"{call.query.shape[1]} tokens and {heads} heads are more than {MOST_PROGRAMS} programs"
    floats = {name: FLOATS for name in ("query", "sinks", "alibi_slopes", "qq_bias", "key_scale", "value_scale")}
    pages = {"key_pages": STORED, "value_pages": STORED}
    return refusal(target, {name: getattr(call, name) for name in (*floats, *pages)}, {**floats, **pages})
