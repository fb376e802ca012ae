"""What goes into the documentation site: which pages, in which order, and with which links."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from ejkernel._plugins.catalog import FACADES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site():
    """The tool, which is a script."""
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "tools" / "build_site.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_site"] = module  # where its dataclass looks for its annotations
    spec.loader.exec_module(module)
    return module


@pytest.mark.tree
def test_every_page_is_in_the_navigation_once(site, tmp_path):
    site.stage(tmp_path / "site")
    staged = {path.relative_to(tmp_path / "site" / "pages").as_posix() for path in tmp_path.rglob("*.md")}
    listed = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(listed) == len({*listed})
    assert {*listed} == staged


@pytest.mark.tree
def test_every_module_of_functions_is_in_the_reference(site):
    homes = {home for page in site.REFERENCES.values() for home in page.homes}
    found = {module.removeprefix("ejkernel.modules.") for module in FACADES.values()}
    assert found == homes | {"executor"}


def test_links_hold_on_the_site(site, tmp_path, monkeypatch):
    monkeypatch.setattr(site, "ROOT", tmp_path)
    monkeypatch.setattr(site, "DOCS", tmp_path / "docs")
    page = tmp_path / "docs" / "inner" / "page.md"
    page.parent.mkdir(parents=True)
    (tmp_path / "picture.png").write_bytes(b"bits")
    page.write_text(
        "[a](../other.md#b) [`c`](../../CONTRIBUTING.md) [d](../../tests/x.py) ![e](../../picture.png) [f](https://x.org)\n"
        "```text\n[g](../../tests/x.py)\n```\n"
    )
    assert site.with_links(page, tmp_path / "pages") == (
        "[a](../other.md#b) [`c`](../CONTRIBUTING.md) d ![e](../pictures/picture.png) [f](https://x.org)\n"
        "```text\n[g](../../tests/x.py)\n```\n"
    )
    assert (tmp_path / "pages" / "pictures" / "picture.png").read_bytes() == b"bits"


def test_pictures_and_tables_become_the_sites(site):
    """Of a picture with a dark form the theme shows one; short code and dates in cells are kept in one piece, calls are not."""
    assert (
        site.both_schemes(
            '<picture><source media="(prefers-color-scheme: dark)" srcset="b.svg"><img alt="A" src="a.svg" width="9"></picture>'
        )
        == '<img alt="A" src="a.svg#only-light" width="9"><img alt="A" src="b.svg#only-dark" width="9">'
    )
    call = "f(a, b, c, d, e, g, h, i, j, k, l, m, n, o, p, q)"
    assert site.whole_identifiers(f"`a` 2026-01-02\n| `a-b` | `{call}` | 2026-01-02 |\n") == (
        f'`a` 2026-01-02\n| `a-b`{{ .whole }} | `{call}` | <span class="whole">2026-01-02</span> |\n'
    )


def test_a_page_with_a_wide_table_leaves_its_contents_out(site):
    assert "toc" in site.front_matter("|" + "---|" * 8) and site.front_matter("| a |\n|---|\n") == ""
