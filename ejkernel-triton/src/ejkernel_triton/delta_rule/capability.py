"""Which calls of `delta_rule` these kernels run."""

from __future__ import annotations

from ejkernel.operations.delta_rule.interface import DeltaRuleCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import FLOATS, refusal

NEWEST = (9, 0)
"""Triton 3.6 does not compile the gradients' kernel for 10.0, and no such device has checked the numbers of the others."""
WIDEST = 256
"""Of a key's head: a program holds a state of whole columns."""
WIDEST_VALUE = 512
MOST = 2**31 - 2**16
"""Tokens and programs are counted in 32 bits; elements in 64."""
_LEAST_BLOCK, _LEAST_CHUNK = 4, 16
_ARRAYS = ("query", "key", "value", "beta", "decay", "a", "b", "initial_state")


def supports_forward(call: DeltaRuleCall, target: Target) -> str | None:
    problem = refusal(target, {name: getattr(call, name) for name in _ARRAYS}, FLOATS)
    if problem:
        return problem
    if target.capability is not None and target.capability > NEWEST:
        return f"needs compute capability {NEWEST[0]}.{NEWEST[1]} or older, {target} has {target.compute_capability}"
    batch, length, _, width = call.query.shape
    channels = call.value.shape[3]
    for name, size, most in (("query", width, WIDEST), ("value", channels, WIDEST_VALUE)):
        if not 0 < size <= most:
            return f"the {name}'s head size {size} is not in 1 ... {most}, what one program holds"
    programs = batch * call.heads * (call.sequences + 1 + length // _LEAST_CHUNK) * -(-channels // _LEAST_BLOCK)
    for name, count in (("tokens", batch * length), ("programs", programs)):
        if count > MOST:
            return f"{count} {name} are more than {MOST}"
    return None


supports_backward = supports_forward
