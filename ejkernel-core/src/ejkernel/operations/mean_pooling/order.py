"""The default order of `mean_pooling`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import TRITON

ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": TRITON}}
"""benchmarks/results/rows_h200.json: forward 1.30 times as fast as XLA (packed sequences over 200 times), backward 2.5 times."""
