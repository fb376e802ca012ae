"""What the conformance kit says when the platform under test never ran."""

from __future__ import annotations

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
