"""Which calls of `linear_recurrence` these kernels run."""

from __future__ import annotations

from ejkernel.operations.linear_recurrence.interface import LinearRecurrenceCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import FLOATS, refusal

NEWEST = (9, 0)
"""Triton 3.6 does not compile the row sums of these kernels for 10.0."""
MAX_HEAD_SIZE = 256
"""Largest head size of keys: a program holds whole columns of the state. Wider heads of values are several calls."""
MAX_COUNT = 2**31 - 2**16
"""Tokens and programs have 32-bit indices, elements 64-bit offsets."""
_MIN_BLOCK, _MIN_SEGMENT = 16, 16


def supports_forward(call: LinearRecurrenceCall, target: Target) -> str | None:
    arrays = ("query", "key", "value", "g", "g_gamma", "gk", "bonus", "value_scale", "skip", "initial_state")
    specs = {name: getattr(call, name) for name in arrays}
    problem = refusal(target, specs, FLOATS)
    if problem:
        return problem
    if target.capability is not None and target.capability > NEWEST:
        return f"needs compute capability {NEWEST[0]}.{NEWEST[1]} or older, {target} has {target.compute_capability}"
    dtypes = {call.query.dtype, call.key.dtype, call.value.dtype}
    if len(dtypes) > 1:
        return f"query is {call.query.dtype}, key {call.key.dtype} and value {call.value.dtype}, needs one dtype"
    batch, length, _, width = call.query.shape
    channels = call.value.shape[3]
    if not 0 < width <= MAX_HEAD_SIZE:
        return f"the query's head size {width} is not in 1 ... {MAX_HEAD_SIZE}, what one program holds"
    if channels == 0:
        return "the value's head size is 0"
    if call.bonus is not None and call.cu_seqlens is not None:
        return "a bonus in packed sequences is not implemented here"
    blocks = -(-max(width, channels) // _MIN_BLOCK)
    programs = batch * call.heads[1] * blocks * (call.sequences + 2 + length // _MIN_SEGMENT) * 16
    for name, count in (("tokens", batch * length), ("programs", programs)):
        if count > MAX_COUNT:
            return f"{count} {name} are more than {MAX_COUNT}"
    return None


supports_backward = supports_forward
