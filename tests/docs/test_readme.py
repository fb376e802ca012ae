"""The code in the pages and in docstrings runs."""

from __future__ import annotations

import doctest
import importlib
import re
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if FENCE.search(page.read_text())]


def modules() -> list[str]:
    """Modules of core, of the XLA platform and of the benchmarks whose docstrings hold examples."""
    sources = [ROOT / folder / "src" for folder in ("ejkernel-core", "ejkernel-xla", "benchmarks")]
    files = [(source, file) for source in sources for file in sorted(source.rglob("*.py")) if ">>> " in file.read_text()]
    names = [".".join(file.relative_to(source).with_suffix("").parts) for source, file in files]
    return [name.removesuffix(".__init__") for name in names]


def test_readme_has_code():
    assert ROOT / "README.md" in PAGES


def test_index_lists_every_page():
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#]+\.md)\)", index.read_text())}
    assert linked == {*(ROOT / "docs").rglob("*.md")} - {index}


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_page(page, tmp_path, monkeypatch):
    """The blocks of a page run in order and share their names, as for a reader who follows it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))  # a page that stores leaves the user's alone
    text = page.read_text()
    for module in " ".join(re.findall(r"^<!-- needs: (.+) -->$", text, re.MULTILINE)).split():
        pytest.importorskip(module, reason=f"the page needs {module}; nox -s docs installs it")
    namespace: dict[str, object] = {"__name__": "__main__"}
    for match in FENCE.finditer(text):
        before = "\n" * text.count("\n", 0, match.start(1))  # so that a traceback shows the page's line
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
