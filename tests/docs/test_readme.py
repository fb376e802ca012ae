"""The code in the pages and in docstrings runs."""

from __future__ import annotations

import doctest
import importlib
import itertools
import re
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^##? ", re.MULTILINE)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def sections(page: Path) -> list[tuple[str, str, int]]:
    """Sections with code: title, text, and the line at which the text begins."""
    if not page.exists():
        return []
    text = page.read_text()
    starts = [0, *(match.start() for match in HEADING.finditer(text)), len(text)]
    found = [(text[start:end], text.count("\n", 0, start)) for start, end in itertools.pairwise(starts)]
    return [(part.partition("\n")[0].lstrip("# "), part, line) for part, line in found if FENCE.search(part)]


def modules() -> list[str]:
    """Modules of core and of the XLA platform whose docstrings hold examples."""
    sources = [ROOT / "ejkernel-core" / "src", ROOT / "ejkernel-xla" / "src"]
    files = [(source, file) for source in sources for file in sorted(source.rglob("*.py")) if ">>> " in file.read_text()]
    names = [".".join(file.relative_to(source).with_suffix("").parts) for source, file in files]
    return [name.removesuffix(".__init__") for name in names]


CODE = [
    pytest.param(page, text, line, id=f"{page.relative_to(ROOT).as_posix()}: {title}")
    for page in PAGES
    for title, text, line in sections(page)
]


def test_readme_has_code():
    assert sections(ROOT / "README.md"), "README.md shows no Python code"


@pytest.mark.parametrize(("page", "text", "line"), CODE)
def test_page(page, text, line, tmp_path, monkeypatch):
    """The blocks of one section run in order and share their names."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for match in FENCE.finditer(text):
        before = "\n" * (line + text.count("\n", 0, match.start(1)))  # so that a traceback shows the page's line
        exec(compile(before + match[1], str(page), "exec"), namespace)


@pytest.mark.parametrize("name", modules())
def test_docstrings(name):
    module = importlib.import_module(name)
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for test in finder.find(module, name):
            runner.run(test)
    assert runner.tries > 0
    assert runner.failures == 0
