"""Which calls of `selective_scan` these kernels run."""

from __future__ import annotations

from ejkernel.operations.selective_scan.interface import SelectiveScanCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import FLOATS, refusal

WIDEST = 256
"""Of a channel's state: one warp holds the states of whole channels in registers."""
MOST = 2**31 - 2**16
"""Tokens and programs are counted in 32 bits; elements in 64."""
MOST_SEQUENCES = 2**27 - 1
"""A packed sequence's number and the marks of a token share 32 bits."""
_LEAST_CHUNK = 16


def supports_forward(call: SelectiveScanCall, target: Target) -> str | None:
    problem = refusal(target, {name: getattr(call, name) for name in ("x", "A", "B", "C", "D", "dt", "initial_state")}, FLOATS)
    if problem:
        return problem
    batch, length, channels = call.x.shape
    width = call.A.shape[2]
    if not 0 < width <= WIDEST:
        return f"A's width {width} is not in 1 ... {WIDEST}, what one warp holds"
    if call.cu_seqlens is not None and (states := batch * (call.cu_seqlens.shape[1] - 1)) > MOST_SEQUENCES:
        return f"{states} packed sequences are more than {MOST_SEQUENCES}"
    for name, count in (("tokens", batch * length), ("programs", batch * channels * (1 + length // _LEAST_CHUNK))):
        if count > MOST:
            return f"{count} {name} are more than {MOST}"
    return None


supports_backward = supports_forward
