"""A field that is added to a call is refused by every platform that was written before it, and ignored by none."""

from __future__ import annotations

import dataclasses

import pytest

from ejkernel._dispatch.decisions import decide
from ejkernel.call import Request
from ejkernel.call.policy import policy_for_call
from ejkernel.operations import OPERATIONS, get_operation, operation_module
from ejkernel.plugin import Implementation, Phase, Target
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
    case = operation_module(operation, "cases").CASES[0]
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


@pytest.mark.parametrize("operation", OPERATIONS)
def test_code_for_an_earlier_revision_is_given_no_later_field(operation):
    owner = get_operation(operation)
    newest = max(owner.optional_fields.values(), default=1)
    for field, since in owner.optional_fields.items():
        for contract in range(1, newest + 2):
            assert owner.accepts(Implementation(operation, "a:b", contract=contract), field) == (contract >= since)
        assert not owner.accepts(Implementation(operation, "a:b", contract=newest, without=(field,)), field)
        assert owner.accepts(Implementation(operation, "a:b", accepts=(field,)), field)
        assert not owner.accepts(Implementation(operation, "a:b", accepts=()), field)


def test_a_field_of_no_revision_is_an_error():
    """When it is written, not when it is called."""
    owner = type(get_operation("paged_attention"))
    for revisions in ((13,), (16, ("first_keys",)), (15, ("a_typing_error",)), ()):
        with pytest.raises(
            TypeError, match=r"revisions: got .*, expected 16 optional fields of PagedAttentionCall \(value_pages"
        ):
            type("Later", (owner,), {"Call": owner.Call, "revisions": revisions})
