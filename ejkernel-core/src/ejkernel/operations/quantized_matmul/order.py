"""The default order of `quantized_matmul`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import TRITON, UNMEASURED, Priority
from ejkernel.operations.quantized_matmul.interface import QuantizedMatmulCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _quantized_on_triton(call: QuantizedMatmulCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/quantized_matmul_triton_h100.json, affine codes of 4 bits, 4096 -> 14336 in bfloat16, us:
    1 row        forward 23.8, XLA 133    backward 27.9, XLA 133
    4096 rows    forward 646, XLA 896     backward 628, XLA 889
    and of other formats quantized_formats_triton_h100.json, where nf4 gains least: 16 rows 50.0, XLA 130. In groups
    (quantized_experts_h100.json), 64 experts 2048 -> 1408:
    8 rows       forward 14.3, XLA 98.2   backward 14.2, XLA 96.2
    4096 rows    forward 207, XLA 1014    backward 156, XLA 1029
    """
    if call.x.dtype != "bfloat16":
        return Priority(UNMEASURED, f"{call.x.dtype} was not timed")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _quantized_on_triton}}
