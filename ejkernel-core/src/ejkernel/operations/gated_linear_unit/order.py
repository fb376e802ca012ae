"""The default order of `gated_linear_unit`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import BEHIND_XLA

ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": BEHIND_XLA}}
"""benchmarks/results/glu_sample_triton_h100.json, 16384 x 14336 in bfloat16: Triton's is 0.99 to 1.00 times as fast as XLA in both
phases, at the device's bandwidth, and XLA may fuse its own with what stands beside it."""
