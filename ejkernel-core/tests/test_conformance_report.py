"""What the conformance suite says when the platform under test never ran."""

from __future__ import annotations

import pytest

from ejkernel.testing import problem
from ejkernel.testing.report import Report


def test_a_platform_that_never_ran_is_told_why_and_what_to_do():
    report = Report("acme")
    report.note("softmax", "contract", "field x", "refused: of another level")
    report.note("softmax", "numbers", "forward", "pass")
    report.note("softmax", "numbers", "plain float32", "refused: needs an Acme 1, the target is cpu")
    first, second, remedy = report.unseen_lines(["softmax", "rope"])
    assert first.endswith("acme was never seen running softmax, so this proves nothing: needs an Acme 1, the target is cpu")
    assert second.endswith("rope, so this proves nothing: no case was run")
    assert "run the suite on a device that acme supports" in remedy and "ejkernel.use(target=...)" in remedy


def test_reports_of_workers_add_up():
    whole = Report("acme")
    for error, outcome in ((1e-3, "pass"), (1e-2, "fail")):
        part = Report("acme")
        part.note("softmax", "numbers", "forward", outcome)
        part.worst("softmax", "float32", error)
        part.ran("softmax")
        whole.merge(part.state())
    assert whole.rows() == [("softmax", "numbers", 0, 0, 1)]
    assert whole.errors["softmax"] == {"float32": 1e-2} and whole.stamped["softmax"] == 2


def test_a_sample_of_cases_keeps_those_that_transforms_are_tried_on():
    every, always = ([case.name for case in cases("flash_attention")] for cases in (problem.cases_of, problem.representative))
    found = [case.name for case in problem.sample_of("flash_attention", 4)]
    assert {*always, *every[::4]} == {*found}
    assert len(always) < len(found) < len(every) / 2


def test_of_a_sample_each_transform_has_one_case_and_none_is_left_out():
    always = problem.representative("flash_attention")
    assert len(always) > 1
    tests = [f"test_{number}" for number in range(20)]
    chosen = [problem.transformed_by(test, "flash_attention", 3) for test in tests]
    assert {len(cases) for cases in chosen} == {1} and {cases[0].name for cases in chosen} == {case.name for case in always}
    assert chosen == [problem.transformed_by(test, "flash_attention", 2) for test in tests]
    assert all(problem.transformed_by(test, "flash_attention", 1) == always for test in tests)


@pytest.mark.parametrize(
    ("refused", "wanted"),
    [((), "float32"), (("float32",), "bfloat16"), (("float32", "bfloat16"), "float16"), (problem.DTYPES, "float32")],
)
def test_transforms_are_tried_in_a_dtype_that_the_platform_runs(monkeypatch, refused, wanted):
    monkeypatch.setattr(problem.Problem, "refusal", lambda self: "no" if self.dtype in refused else None)
    case = problem.representative("softmax")[0]
    assert problem.Problem("softmax", case, "float32", "acme").in_what_runs().dtype == wanted
