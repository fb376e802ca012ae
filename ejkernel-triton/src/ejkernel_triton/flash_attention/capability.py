"""Which calls of `flash_attention` these kernels run."""

from __future__ import annotations

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.plugin import Target
from ejkernel_triton._blocks import MIN_DOT_SIZE
from ejkernel_triton._capability import FLOATS, refusal
from ejkernel_triton.flash_attention.score_params import functions_refused

MAX_HEAD_SIZE = 512
"""A program holds whole rows of a head."""
MAX_TOKENS = 2**27
MAX_OFFSET = 2**29
"""Positions are 32-bit, element offsets 64-bit."""
MAX_SINKS = 1024
MAX_PROGRAMS = 2**31 - 1


def supports_forward(call: FlashAttentionCall, target: Target) -> str | None:
    return _refusal(call, target) or functions_refused(call, "forward")


def supports_backward(call: FlashAttentionCall, target: Target) -> str | None:
    problem = _refusal(call, target) or functions_refused(call, "backward")
    if problem or call.bias is None:
        return problem
    batch, heads, queries, keys = call.bias.shape
    programs = batch * heads * -(-queries // MIN_DOT_SIZE) * -(-keys // MIN_DOT_SIZE)
    if programs > MAX_PROGRAMS:
        return f"the gradient of a bias of shape {call.bias.shape} may need {programs} programs, more than {MAX_PROGRAMS}"
    return None


def _refusal(call: FlashAttentionCall, target: Target) -> str | None:
    specs = {name: getattr(call, name) for name in ("query", "key", "value", "bias", "softmax_aux")}
    problem = refusal(target, specs, FLOATS)
    if problem:
        return problem
    batch, queries, heads, size = call.query.shape
    keys, value_size = call.value.shape[1], call.value.shape[3]
    for name, width in (("query", size), ("value", value_size)):
        if width > MAX_HEAD_SIZE:
            return f"the {name}'s head size {width} is above {MAX_HEAD_SIZE}, the widest that one program holds"
    if max(queries, keys) > MAX_TOKENS:
        return f"{max(queries, keys)} tokens are more than {MAX_TOKENS}"
    if abs(call.query_offset) > MAX_OFFSET:
        return f"query_offset {call.query_offset} is beyond {MAX_OFFSET}"
    if call.softmax_aux is not None and call.softmax_aux.shape[2] > MAX_SINKS:
        return f"{call.softmax_aux.shape[2]} sinks per head are more than {MAX_SINKS}"
    programs = batch * heads * -(-max(queries, keys) // MIN_DOT_SIZE)
    if programs > MAX_PROGRAMS:
        return f"{batch} x {heads} heads of {max(queries, keys)} tokens may need {programs} programs, more than {MAX_PROGRAMS}"
    return None
