"""Recurrences in chunks: NaN in a token reaches that token and later ones, and no gradient of an earlier one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ejkernel.call.case import Case
from ejkernel.operations.delta_rule.cases import arrays as delta
from ejkernel.operations.linear_recurrence.cases import arrays as linear
from ejkernel.testing.problem import Problem
from ejkernel.utils.tolerance import EXTREME, FORWARD, GRADIENT, check_close
from ejkernel_xla.delta_rule.config import DeltaRuleConfig
from ejkernel_xla.linear_recurrence.config import LinearRecurrenceConfig

STATE = {"return_state": True}
CHUNKS = {"linear_recurrence": LinearRecurrenceConfig(16, 8), "delta_rule": DeltaRuleConfig(16, 2)}
NAN = {
    "by-key": ("linear_recurrence", linear(1, 40, decays="gk", garbage=22, state=True), STATE),
    "scalar": ("linear_recurrence", linear(length=24, decays="g", garbage=13), {}),
    "by-value": ("linear_recurrence", linear(length=24, decays="gv", garbage=13), {}),
    "no-decay": ("linear_recurrence", linear(length=24, garbage=1, value_heads=4), {}),
    "factors": ("linear_recurrence", linear(length=24, decays="g", value_scale=True, skip="head", garbage=13), {}),
    "bonus": ("linear_recurrence", linear(length=24, decays="gk", bonus=True, garbage=13), {}),
    "delta": ("delta_rule", delta(1, 40, garbage=22, state=True), STATE),
    "delta-by-channel": ("delta_rule", delta(length=24, decay="channel", low_rank="ab", beta=False, garbage=13), {}),
}
FORGETS = {
    "by-key": ("linear_recurrence", linear(length=24, decays="gk", extreme=True, forget=True, state=True), STATE),
    "both": ("linear_recurrence", linear(length=24, decays="g gv", extreme=True, forget=True, state=True), STATE),
    "delta": ("delta_rule", delta(1, 24, extreme=True, forget=True, state=True), STATE),
    "delta-by-channel": ("delta_rule", delta(1, 24, extreme=True, forget=True, decay="channel", state=True), STATE),
}


def problem_of(operation: str, arrays: Any, options: Any) -> tuple[Problem, Any]:
    return Problem(operation, Case("chunks", arrays, options), "float32", "xla"), CHUNKS[operation]


@pytest.mark.parametrize("name", NAN)
def test_nan_reaches_no_earlier_token(name: str) -> None:
    problem, config = problem_of(*NAN[name])
    for what, value in problem.outputs(config).items():
        right = getattr(problem.expected_outputs, what)
        nan = np.isnan(right)
        assert nan.any()
        np.testing.assert_array_equal(np.isnan(value), nan)
        check_close(what, np.where(nan, 0, value), np.where(nan, 0, right), FORWARD["float32"])
    for what, value in problem.gradients(config).items():
        right = problem.expected_gradients[what]
        nan = np.isnan(right)
        check_close(what, np.where(nan, 0, value), np.where(nan, 0, right), GRADIENT["float32"])


@pytest.mark.parametrize("name", FORGETS)
def test_a_decay_of_minus_infinity_forgets(name: str) -> None:
    problem, config = problem_of(*FORGETS[name])
    for what, value in problem.outputs(config).items():
        check_close(what, value, getattr(problem.expected_outputs, what), FORWARD["float32"])
    for what, value in problem.gradients(config).items():
        check_close(what, value, problem.expected_gradients[what], EXTREME, 1.0)
