"""The default order of `delta_rule`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import TRITON, Priority
from ejkernel.operations.delta_rule.interface import DeltaRuleCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _delta_rule_on_triton(call: DeltaRuleCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: delta_rule_triton_h100.json, recurrences_float32_h200.json."""
    return Priority(TRITON)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {"gpu": {"triton": _delta_rule_on_triton}}
