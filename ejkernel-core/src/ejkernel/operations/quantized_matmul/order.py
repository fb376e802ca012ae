"""The default order of `quantized_matmul`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import TRITON, UNMEASURED, Priority
from ejkernel.operations.quantized_matmul.interface import QuantizedMatmulCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _quantized_on_triton(call: QuantizedMatmulCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/quantized_matmul_triton_h100.json, us in bfloat16, 4096 -> 14336, beside the product of weights in
    bfloat16; affine in groups of 64:
    4 bits, 1 row        forward 23.8, XLA 133, plain 39.6    backward 27.9, XLA 133, plain 42.6
    4 bits, 16 rows      forward 24.5, XLA 130, plain 43.9    backward 35.2, XLA 134, plain 45.0
    4 bits, 64 rows      forward 55.7, XLA 140, plain 48.1    backward 56.4, XLA 149, plain 51.9
    4 bits, 4096 rows    forward 646, XLA 896, plain 601      backward 628, XLA 889
    8 bits, 16 rows      forward 47.6, XLA 132, plain 43.6
    mxfp4, 16 rows       forward 30.1, XLA 130    nvfp4 31.0, XLA 131    mxfp8 36.5, XLA 167    nf4 50.0, XLA 130
    """
    if call.x.dtype != "bfloat16":
        return Priority(UNMEASURED, f"{call.x.dtype} was not timed")
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _quantized_on_triton}}
