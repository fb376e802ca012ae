"""The default order of `rwkv4`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import TRITON, UNMEASURED, Priority
from ejkernel.operations.rwkv4.interface import Rwkv4Call
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _rwkv4_on_triton(call: Rwkv4Call, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: scans_triton_h100.json."""
    if call.k.dtype != "bfloat16":
        return Priority(UNMEASURED, f"{call.k.dtype} was not timed")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _rwkv4_on_triton}}
