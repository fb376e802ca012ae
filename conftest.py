"""For every suite: annotations are checked at run time, and `--extent`, which the conformance suite's plugin defines, says how much
runs.

quick: one in four of similar parametrised tests. standard: all of them. full: the slow tests too.
"""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("EJKERNEL_TYPECHECK", "1")

pytest_plugins = ["ejkernel.testing.plugin", "pytester"]

_QUICK = 4
"""One in so many of similar tests, outside of the conformance suite, which has its own sample."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests run in full, and where the command line names tests or marks."""
    from ejkernel.testing.extent import keep, sampled  # not above: no conftest has set up the environment yet

    extent = config.getoption("--extent")
    own = [item for item in items if item.get_closest_marker("ejkernel_level") is None]
    wanted = {*(sampled(own, _QUICK) if extent == "quick" else own)}
    named = config.getoption("-m") or any("::" in argument for argument in config.args)
    if extent != "full" and not named:
        wanted = {item for item in wanted if item.get_closest_marker("slow") is None}
    left_out = {*own} - wanted
    keep(config, items, [item for item in items if item not in left_out])
