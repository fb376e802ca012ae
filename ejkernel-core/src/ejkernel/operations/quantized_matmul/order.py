"""The default order of `quantized_matmul`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import TRITON, UNMEASURED, Priority
from ejkernel.operations.quantized_matmul.interface import QuantizedMatmulCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _quantized_on_triton(call: QuantizedMatmulCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: quantized_matmul_triton_h100.json, quantized_formats_triton_h100.json, quantized_experts_h100.json."""
    if call.x.dtype != "bfloat16":
        return Priority(UNMEASURED, f"{call.x.dtype} was not timed")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _quantized_on_triton}}
