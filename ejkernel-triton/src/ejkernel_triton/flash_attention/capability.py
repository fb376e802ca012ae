"""Which calls of `flash_attention` these kernels run."""

from __future__ import annotations

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.plugin import Target
from ejkernel_triton._blocks import SMALLEST_PRODUCT
from ejkernel_triton._capability import FLOATS, refusal

WIDEST = 512
"""Of a head: a program holds whole rows of it."""
MOST_TOKENS = 2**27
FARTHEST_OFFSET = 2**29
"""Positions are counted in 32 bits; elements in 64."""
MOST_SINKS = 1024
MOST_PROGRAMS = 2**31 - 1


def supports_forward(call: FlashAttentionCall, target: Target) -> str | None:
    return _refusal(call, target)


def supports_backward(call: FlashAttentionCall, target: Target) -> str | None:
    problem = _refusal(call, target)
    if problem or call.bias is None:
        return problem
    batch, heads, queries, keys = call.bias.shape
    programs = batch * heads * -(-queries // SMALLEST_PRODUCT) * -(-keys // SMALLEST_PRODUCT)
    if programs > MOST_PROGRAMS:
        return f"the gradient of a bias of shape {call.bias.shape} may need {programs} programs, more than {MOST_PROGRAMS}"
    return None


def _refusal(call: FlashAttentionCall, target: Target) -> str | None:
    specs = {name: getattr(call, name) for name in ("query", "key", "value", "bias", "sinks")}
    problem = refusal(target, specs, FLOATS)
    if problem:
        return problem
    batch, queries, heads, size = call.query.shape
    keys, value_size = call.value.shape[1], call.value.shape[3]
    for name, width in (("query", size), ("value", value_size)):
        if width > WIDEST:
            return f"the {name}'s head size {width} is above {WIDEST}, the widest that one program holds"
    if max(queries, keys) > MOST_TOKENS:
        return f"{max(queries, keys)} tokens are more than {MOST_TOKENS}"
    if abs(call.query_offset) > FARTHEST_OFFSET:
        return f"query_offset {call.query_offset} is beyond {FARTHEST_OFFSET}"
    if call.sinks is not None and call.sinks.shape[2] > MOST_SINKS:
        return f"{call.sinks.shape[2]} sinks per head are more than {MOST_SINKS}"
    programs = batch * heads * -(-max(queries, keys) // SMALLEST_PRODUCT)
    if programs > MOST_PROGRAMS:
        return f"{batch} x {heads} heads of {max(queries, keys)} tokens may need {programs} programs, more than {MOST_PROGRAMS}"
    return None
