"""How much of the tests a run takes: `--extent=quick|standard|full`."""

from __future__ import annotations

import dataclasses
import zlib

import pytest


@dataclasses.dataclass(frozen=True)
class Extent:
    """What the conformance suite takes of its cases, dtypes and tests.

    Attributes:
        cases: numbers are checked on one case in so many, beside those on which transforms are tried. Above 1 each transform is
            tried on one case only, which differs from test to test.
        interpreted_cases: the same for a platform that has no kernels for this machine's device, so that its suite interprets them.
        every_dtype: whether every case runs in bfloat16 and float16 too, not only those on which transforms are tried.
        tests: of a test with many parameters, the first set runs and one in so many of the others.
        lowered: cases that are lowered for every target; None for all.
    """

    cases: int = 1
    interpreted_cases: int = 1
    every_dtype: bool = True
    tests: int = 1
    lowered: int | None = 3


EXTENTS = {
    "quick": Extent(cases=12, interpreted_cases=32, every_dtype=False, tests=4),
    "standard": Extent(),
    "full": Extent(lowered=None),
}


def add_options(group: pytest.OptionGroup) -> None:
    """`--extent`, and the options that it replaces."""
    about = "how much to run: quick a sample, standard every case in every dtype, full also lowers every case for every target"
    group.addoption("--extent", choices=tuple(EXTENTS), default="standard", help=about)
    group.addoption("--ejkernel-full", action="store_true", help="deprecated: --extent=full")
    group.addoption("--ejkernel-quick", action="store_true", help="deprecated: --extent=quick")
    group.addoption("--ejkernel-sample", type=int, metavar="N", help="deprecated: --extent=quick")


def extent_of(config: pytest.Config) -> Extent:
    """The extent of a run, with what deprecated options change in it."""
    extent = EXTENTS[str(config.getoption("--extent"))]
    step = config.getoption("--ejkernel-sample")
    if config.getoption("--ejkernel-full"):
        extent = dataclasses.replace(extent, lowered=None)
    if config.getoption("--ejkernel-quick"):
        extent = dataclasses.replace(extent, every_dtype=False)
    if step is not None:
        if step < 1:
            raise pytest.UsageError(f"--ejkernel-sample: got {step}, expected a value >= 1")
        extent = dataclasses.replace(extent, cases=step, interpreted_cases=step)
    return extent


def warn_of_deprecated_options(config: pytest.Config) -> None:
    """Once per run: not in the workers of pytest-xdist, which repeat their parent's options."""
    if hasattr(config, "workerinput"):
        return
    given = {"--ejkernel-full": config.getoption("--ejkernel-full"), "--ejkernel-quick": config.getoption("--ejkernel-quick")}
    given["--ejkernel-sample"] = config.getoption("--ejkernel-sample") is not None
    for option in (option for option, is_given in given.items() if is_given):
        instead = "full" if option == "--ejkernel-full" else "quick"
        message = f"{option} is deprecated and goes with the next release; use --extent={instead}"
        config.issue_config_time_warning(DeprecationWarning(message), stacklevel=2)


def sampled(items: list[pytest.Item], step: int) -> list[pytest.Item]:
    """Of each test the first set of parameters, and of the others one in `step`, always the same ones.

    Of a test of problems it is the first of each operation, so that every operation is run. A test of transforms that tries each
    problem in several ways, as over two and four devices, keeps as many as if it were one way. Tests marked `unsampled` keep all.
    """
    ways = _ways(items)
    seen: set[tuple[str, str]] = set()
    kept: list[pytest.Item] = []
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        function = item.nodeid.partition("[")[0], getattr(parameters.get("problem"), "operation", "")
        if (
            function not in seen
            or item.get_closest_marker("unsampled") is not None
            or (zlib.crc32(name := item.nodeid.encode()) % step == 0 and zlib.adler32(name) % ways.get(function[0], 1) == 0)
        ):
            kept.append(item)
        seen.add(function)
    return kept


def _ways(items: list[pytest.Item]) -> dict[str, int]:
    """In how many ways each test of transforms tries a problem."""
    found: dict[str, set[str]] = {}
    for item in items:
        parameters = dict(getattr(getattr(item, "callspec", None), "params", {}))
        if parameters.pop("transformed", None) is not None:
            found.setdefault(item.nodeid.partition("[")[0], set()).add(str(parameters))
    return {name: len(ways) for name, ways in found.items()}


def keep(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    """Leave `kept` of the collected `items`, in place, and report the others as deselected."""
    remaining = {*kept}
    left_out = [item for item in items if item not in remaining]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in remaining]
