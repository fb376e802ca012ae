"""Pytest plugin of the conformance suite: options, parameters, the report and the evidence check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ejkernel.testing.extent import Extent, add_options, extent_of, keep, sampled, warn_of_deprecated_options
from ejkernel.testing.report import Report
from ejkernel.testing.settings import host_devices, promote_nothing

_REPORT: pytest.StashKey[Report] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ejkernel")
    group.addoption("--ejkernel-platform", default=None, help="platform or implementation under test, e.g. xla or cuda.cudnn")
    group.addoption("--ejkernel-operation", action="append", default=[], help="only this operation (repeatable)")
    group.addoption("--ejkernel-dtype", action="append", default=[], help="only this dtype (repeatable)")
    group.addoption("--ejkernel-case", action="append", default=[], help="only cases whose name contains this (repeatable)")
    group.addoption("--ejkernel-report", default=None, type=Path, help="write the report here as JSON")
    add_options(group)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ejkernel_level(name): level of the conformance suite that a test belongs to")
    config.addinivalue_line("markers", "unsampled: runs with all of its parameters whatever --extent says")
    warn_of_deprecated_options(config)
    platform = config.getoption("--ejkernel-platform")
    if platform is None:
        return
    host_devices()
    config.stash[_REPORT] = Report(platform)
    config.add_cleanup(promote_nothing())


def _platform(config: pytest.Config) -> str:
    name = config.getoption("--ejkernel-platform")
    if name is None:
        raise pytest.UsageError("the conformance suite needs --ejkernel-platform=NAME")
    return name


_PARAMETERS = frozenset({"problem", "operation_name", "summed", "toggled", "transformed"})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a platform to test, the suite is deselected, so that it can live beside ordinary tests."""
    suite = [item for item in items if item.get_closest_marker("ejkernel_level")]
    without = config.getoption("--ejkernel-platform") is None
    wanted = {*([] if without else sampled(suite, extent_of(config).tests))}
    left_out = {*suite} - wanted
    keep(config, items, [item for item in items if item not in left_out])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    wanted = _PARAMETERS & {*metafunc.fixturenames}
    if not wanted:
        return
    if metafunc.config.getoption("--ejkernel-platform") is None:
        for name in wanted:
            metafunc.parametrize(name, [None], ids=["needs --ejkernel-platform"])
        return
    from ejkernel.testing import problem as problems

    config = metafunc.config
    platform = _platform(config)
    operations = problems.operations_of(platform)
    if not operations:
        raise pytest.UsageError(f"--ejkernel-platform={platform}: it implements no operation; see `ejkernel doctor`")
    operations = config.getoption("--ejkernel-operation") or operations
    cases, extent = config.getoption("--ejkernel-case"), extent_of(config)
    step = extent.cases if problems.runs_on_this_machine(platform) else extent.interpreted_cases

    def admitted(name: str) -> bool:
        return not cases or any(part in name for part in cases)

    if "problem" in metafunc.fixturenames:
        found = [
            problems.Problem(operation, case, dtype, platform)
            for operation in operations
            for case in problems.sample_of(operation, step)
            for dtype in config.getoption("--ejkernel-dtype") or _dtypes(extent, operation, case)
            if admitted(case.name) and case.fits(dtype)
        ]
        metafunc.parametrize("problem", found, ids=[f"{p.operation}-{p.case.name}-{p.dtype}" for p in found])
    if "transformed" in metafunc.fixturenames:
        found = [
            problems.Problem(operation, case, "float32", platform)
            for operation in operations
            for case in problems.transformed_by(metafunc.function.__name__, operation, step)
            if admitted(case.name)
        ]
        metafunc.parametrize("transformed", found, ids=[f"{p.operation}-{p.case.name}" for p in found], indirect=True)
    if "summed" in metafunc.fixturenames:
        found = [
            problems.Problem(operation, case, "bfloat16", platform)
            for operation in operations
            for case in problems.cases_of(operation)
            if "sums" in case.tags and admitted(case.name)
        ]
        metafunc.parametrize("summed", found, ids=[f"{p.operation}-{p.case.name}" for p in found])
    if "toggled" in metafunc.fixturenames:
        pairs = [(operation, field) for operation in operations for field in problems.toggles_of(operation)]
        metafunc.parametrize("toggled", pairs, ids=["-".join(pair) for pair in pairs])
    if "operation_name" in metafunc.fixturenames:
        metafunc.parametrize("operation_name", operations)


def _dtypes(extent: Extent, operation: str, case: Any) -> tuple[str, ...]:
    from ejkernel.testing import problem as problems

    every = extent.every_dtype or case in problems.representative(operation)
    return problems.DTYPES if every else problems.DTYPES[:1]


@pytest.fixture
def transformed(request: pytest.FixtureRequest) -> Any:
    """A problem to try transforms on, in float32 or, where the platform refuses that, in a half."""
    return request.param.in_what_runs()


@pytest.fixture
def platform_name(request: pytest.FixtureRequest) -> str:
    """The platform under test."""
    return _platform(request.config)


@pytest.fixture
def extent(request: pytest.FixtureRequest) -> Extent:
    """How much of the suite is to run."""
    return extent_of(request.config)


@pytest.fixture
def conformance_report(request: pytest.FixtureRequest) -> Report:
    """The report of this run."""
    return request.config.stash[_REPORT]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    outcome = yield
    report = item.config.stash.get(_REPORT, None)
    level = item.get_closest_marker("ejkernel_level")
    if report is not None and level is not None and (outcome.when == "call" or outcome.failed):
        params = getattr(item, "callspec", None)
        values = list(params.params.values()) if params else []
        subject = values[0] if values else "-"
        operation = getattr(subject, "operation", subject[0] if isinstance(subject, tuple) else subject)
        feature = item.name.removeprefix("test_")
        if outcome.failed:
            report.note(operation, level.args[0], feature, "fail")
        elif outcome.passed:
            report.note(operation, level.args[0], feature, "pass")
    return outcome


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    report = config.stash.get(_REPORT, None)
    if report is None or not report.outcomes:
        return
    terminalreporter.section(f"ejkernel conformance of {report.platform}")
    for line in report.lines():
        terminalreporter.line(line)
    path = config.getoption("--ejkernel-report")
    if path is not None:
        report.write(path)
        terminalreporter.line(f"report written to {path}")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """pytest-xdist: take in what a worker found."""
    report, output = node.config.stash.get(_REPORT, None), getattr(node, "workeroutput", {})
    if report is not None and "ejkernel_report" in output:
        report.merge(output["ejkernel_report"])


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run in which the platform under test never ran proves nothing, and fails."""
    report = session.config.stash.get(_REPORT, None)
    output = getattr(session.config, "workeroutput", None)  # of a worker of pytest-xdist; its parent judges
    if report is not None and output is not None:
        output["ejkernel_report"] = report.state()
        return
    if report is None or exitstatus != 0:
        return
    numbers = {operation for operation, level, _ in report.outcomes if level == "numbers"}
    unseen = sorted(operation for operation in numbers if not report.stamped[operation])
    if unseen:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            for line in report.unseen_lines(unseen):
                reporter.line(line, red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
