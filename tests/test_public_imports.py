"""The other distributions import public names of core only: what has no leading underscore, in any part of its dotted name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unsampled

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for source in (*ROOT.glob("*/src"), *ROOT.glob("examples/*/src"))
    if source.parent.name != "ejkernel-core"
    for path in source.rglob("*.py")
)


def names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything of core that a file imports, wherever the statement stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.partition(".")[0] == "ejkernel")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ejkernel":
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_there_are_files_of_every_distribution():
    assert {"ejkernel_cuda", "ejkernel_pallas", "ejkernel_triton", "ejkernel_xla"} <= {
        p.parts[len(ROOT.parts) + 2] for p in SOURCES
    }


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_are_public(path):
    private = [f"{path}:{line}: {name}" for line, name in names(path) if any(part[0] == "_" for part in name.split("."))]
    assert not private, "\n".join(private)
