"""`--extent` of the conformance suite, and the options that it replaces."""

from __future__ import annotations

from collections import Counter

import pytest

from ejkernel.testing import problem
from ejkernel.testing.extent import EXTENTS, Extent, extent_of, sampled

SUITE = """
from ejkernel.testing.suite.contract import *
from ejkernel.testing.suite.numbers import *
"""


@pytest.fixture
def collected(pytester: pytest.Pytester):
    """Ids of what pytest takes of the suite with some options."""
    pytester.makepyfile(test_suite=SUITE)

    def collect(*options: str, platform: str = "xla") -> list[str]:
        arguments = ("-p", "ejkernel.testing.plugin", "-p", "no:cacheprovider", "--collect-only", "-q")
        which = (f"--ejkernel-platform={platform}", "--ejkernel-operation=flash_attention")
        result = pytester.runpytest_inprocess(*arguments, *which, *options)
        assert result.ret == 0, result.outlines
        return [line.partition("::")[2] for line in result.outlines if "::" in line]

    return collect


def test_quick_is_part_of_standard_and_standard_is_the_default(collected):
    quick, standard, default, full = (collected(*o) for o in (["--extent=quick"], ["--extent=standard"], [], ["--extent=full"]))
    assert default == standard == full
    assert {*quick} < {*standard} and 1 < len(quick) < len(standard) / 4
    assert {name.partition("[")[0] for name in quick} == {name.partition("[")[0] for name in standard}


def test_quick_tries_every_option(collected):
    options = {f"test_field_is_consumed[flash_attention-{field}]" for field in problem.toggles_of("flash_attention")}
    assert len(options) > 15 and options <= {*collected("--extent=quick")}


WAYS = """
import pytest

@pytest.mark.parametrize("transformed", range(64))
def test_one_way(transformed): ...

@pytest.mark.parametrize("devices", range(8))
@pytest.mark.parametrize("transformed", range(64))
def test_eight_ways(transformed, devices): ...
"""


def test_several_ways_of_one_transform_are_sampled_as_one(pytester):
    kept = Counter(item.originalname for item in sampled(pytester.getitems(WAYS), 4))
    assert 8 < kept["test_one_way"] < 32 and 8 < kept["test_eight_ways"] < 32


def test_standard_has_every_case_in_every_dtype(collected):
    cases = {case.name for case in problem.cases_of("flash_attention") if "extreme" not in case.tags}
    found = {name for name in collected() if name.startswith("test_forward[")}
    for dtype in problem.DTYPES:
        assert {f"test_forward[flash_attention-{case}-{dtype}]" for case in cases} <= found


def test_quick_has_fewer_cases_where_the_platform_is_interpreted(collected, monkeypatch):
    natively = collected("--extent=quick")
    monkeypatch.setattr(problem, "runs_on_this_machine", lambda platform: False)
    assert 1 < len(collected("--extent=quick")) < len(natively)


@pytest.mark.parametrize(("backend", "wanted"), [("cpu", True), ("any", True), ("gpu", False)])
def test_a_platform_runs_here_if_one_of_its_implementations_is_for_this_device(registered, backend, wanted):
    registered("made-up", backend=backend)
    assert problem.runs_on_this_machine("made-up") is wanted


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], Extent()),
        (["--ejkernel-full"], EXTENTS["full"]),
        (["--ejkernel-quick"], Extent(every_dtype=False)),
        (["--ejkernel-sample=5"], Extent(cases=5, interpreted_cases=5)),
        (["--extent=quick", "--ejkernel-sample=1"], Extent(every_dtype=False, tests=4)),
    ],
)
def test_deprecated_options_still_work(pytester, options, wanted):
    config = pytester.parseconfig("-p", "ejkernel.testing.plugin", *options)
    assert extent_of(config) == wanted


@pytest.mark.parametrize(
    ("option", "instead"),
    [("--ejkernel-full", "full"), ("--ejkernel-quick", "quick"), ("--ejkernel-sample=3", "quick")],
)
def test_deprecated_options_name_what_replaces_them(pytester, option, instead):
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest_inprocess("-p", "ejkernel.testing.plugin", "-p", "no:cacheprovider", option)
    said = (
        f"*DeprecationWarning: {option.partition('=')[0]} is deprecated and goes with the next release; use --extent={instead}"
    )
    result.stdout.fnmatch_lines([said])
    result.assert_outcomes(passed=1, warnings=1)


def test_a_sample_of_no_case_is_refused(pytester):
    with pytest.raises(pytest.UsageError, match="--ejkernel-sample: got 0, expected a value >= 1"):
        extent_of(pytester.parseconfig("-p", "ejkernel.testing.plugin", "--ejkernel-sample=0"))
