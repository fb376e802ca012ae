"""The default order of `delta_rule`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import TRITON, Priority
from ejkernel.operations.delta_rule.interface import DeltaRuleCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _delta_rule_on_triton(call: DeltaRuleCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/delta_rule_triton_h100.json, ms in bfloat16:

    decays per head, B1 T8192 H32 D128      forward 0.353, XLA 4.84    backward 1.06, XLA 16.8
    decays per head, B2 T4096 H16 D128      forward 0.180, XLA 2.32
    decays per channel, B1 T8192 H32 D128   forward 0.737, XLA 9.61    backward 2.32, XLA 40.2
    general form, B2 T4096 H32 D64          forward 0.645, XLA 7.80    backward 1.42, XLA 32.4
    general form, B2 T4096 H16 D128         forward 0.858, XLA 7.36    backward 2.12, XLA 31.5
    one token, B64 H32 D128                 0.096: the state is read and written once, at 0.93 of the rate of a copy

    In float32 2.6 (decays per head), 5.0 (per channel) and 4.5 times as fast (RWKV-7) with gradients, in float16 2.0, 4.2 and 3.7
    times (recurrences_float32_h200.json).
    """
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _delta_rule_on_triton}}
