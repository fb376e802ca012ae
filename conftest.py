"""For every suite: annotations are checked at run time, and an option samples tests that are made from many parameters."""

from __future__ import annotations

import os
import zlib

import pytest

os.environ.setdefault("EJKERNEL_TYPECHECK", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "of a test with many parameters run the first set and one in N of the others, always the same"
    parser.addoption("--sample", type=int, default=1, metavar="N", help=about)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    step = config.getoption("--sample")
    if step < 1:
        raise pytest.UsageError(f"--sample: got {step}, expected a value >= 1")
    seen: set[str] = set()
    left_out = []
    for item in items:
        function = item.nodeid.partition("[")[0]
        skippable = function in seen and item.get_closest_marker("unsampled") is None
        if skippable and zlib.crc32(item.nodeid.encode()) % step:
            left_out.append(item)
        seen.add(function)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
