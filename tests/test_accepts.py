"""A field that is added to a call is refused by every platform that was written before it, and ignored by none."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

from ejkernel._dispatch.decisions import decide
from ejkernel._plugins.levels import FIELDS_OF_LEVEL_1
from ejkernel.call import Request
from ejkernel.call.policy import policy_for_call
from ejkernel.operations import OPERATIONS, get_operation
from ejkernel.plugin import Phase, Target
from ejkernel.testing.shapes import bound_shapes

TARGETS = (Target("cpu", "cpu"), Target("gpu", "NVIDIA H100 80GB HBM3", "9.0"), Target("tpu", "TPU v5p"))
PHASES: tuple[Phase, ...] = ("forward", "backward")


def with_new_field(call, value):
    """The call as a later core may have it: with one more optional field, here with a value."""
    later = dataclasses.make_dataclass(
        type(call).__name__, [("invented", int, dataclasses.field(default=0))], bases=(type(call),), frozen=True, kw_only=True
    )
    given = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    return later(**given, invented=value)


def decisions(operation, value):
    case = importlib.import_module(f"ejkernel.operations.{operation}.cases").CASES[0]
    call = with_new_field(bound_shapes(operation, case, "bfloat16")[1], value)
    for target in TARGETS:
        request = Request(get_operation(operation), call, target, policy_for_call(operation, None))
        for phase in PHASES if get_operation(operation).differentiable else PHASES[:1]:
            yield decide(request.saving_residuals() if phase == "backward" else request, phase)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_new_field_is_refused_by_every_implementation(operation):
    for decision in decisions(operation, 1):
        assert decision.chosen is None
        assert decision.verdicts
        for verdict in decision.verdicts:
            assert verdict.verdict == "refused"
            assert f"{verdict.candidate.id} does not accept invented" in verdict.reasons


@pytest.mark.parametrize("operation", OPERATIONS)
def test_at_its_default_it_is_no_reason(operation):
    found = [*decisions(operation, 0)]
    assert not [reason for decision in found for v in decision.verdicts for reason in v.reasons if "invented" in reason]
    assert all(decision.chosen is not None for decision in found)


@pytest.mark.parametrize("operation", FIELDS_OF_LEVEL_1)
def test_what_plugins_of_level_1_are_taken_to_accept_is_there(operation):
    known = {*FIELDS_OF_LEVEL_1[operation], "save_residuals"}
    fields = dataclasses.fields(get_operation(operation).Call)
    optional = {field.name for field in fields if field.default is not dataclasses.MISSING}
    assert known <= optional
