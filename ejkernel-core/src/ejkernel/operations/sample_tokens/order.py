"""The default order of `sample_tokens`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import BEHIND_XLA, TRITON, Priority
from ejkernel.operations.sample_tokens.interface import SampleTokensCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target

_FEWEST_ROWS = 64
"""One program of Triton's kernel reads a row, as fast for one row as for as many as there are multiprocessors."""


def _sample_on_triton(call: SampleTokensCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/glu_sample_triton_h100.json, us, 128256 tokens in bfloat16, top_k 50 in an array and top_p 0.9: 1 row 460,
    XLA 193; 16 rows 471, XLA 225; 64 rows 473, XLA 546; 256 rows 991, XLA 1846, plain JAX, which sorts, 2505."""
    if call.logits.shape[0] * call.logits.shape[1] >= _FEWEST_ROWS:
        return Priority(TRITON)
    return Priority(BEHIND_XLA, f"XLA's was faster for fewer than {_FEWEST_ROWS} rows")


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _sample_on_triton}}
