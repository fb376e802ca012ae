"""The default order of `sample_tokens`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import BEHIND_XLA, TRITON, Priority
from ejkernel.operations.sample_tokens.interface import SampleTokensCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target

_FEWEST_ROWS = 64
"""Of rows without a top_k: a program has one, and is as fast for one row as for as many as there are multiprocessors."""


def _sample_on_triton(call: SampleTokensCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/orders_grid_h200.json, us, 128256 tokens in bfloat16, top_k and top_p in arrays: 1 row 34, XLA 42; 16 rows
    49, XLA 239; 64 rows 134, XLA 992. Without a top_k glu_sample_triton_h100.json, and
    orders_grid_pages_more_h200.json where every token is kept."""
    if all(kept is None for kept in (call.top_k, call.static_top_k, call.top_p, call.min_p)):
        return Priority(BEHIND_XLA, "XLA's was faster where every token is kept")
    rows = call.logits.shape[0] * call.logits.shape[1]
    if call.top_k is not None or call.static_top_k is not None or rows >= _FEWEST_ROWS:
        return Priority(TRITON)
    return Priority(BEHIND_XLA, f"XLA's was faster for fewer than {_FEWEST_ROWS} rows without top_k")


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _sample_on_triton}}
