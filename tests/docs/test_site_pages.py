"""What goes into the documentation site: which pages, in which order, and with which links."""

from __future__ import annotations

import ast
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


def test_the_search_finds_what_explains_first(site):
    entry = {"level": 2, "text": "text", "path": ["A", "b"], "tags": []}
    places = ("evidence/a.html#b", "measurements/a.html#b", "reference/a.html", "masks.html")
    items = [{**entry, "location": place, "title": "mask"} for place in places]
    found = site.site_search.ordered(items)
    assert [one["location"] for one in found if one["title"].endswith("mask")] == [*reversed(places)]
    assert found[-1]["title"] == "Evidence: mask" and found[-2]["text"] == ""
    assert any(one["title"] == "EJKERNEL_LOG" and one["location"] == "environment.html#ejkernel_log" for one in found)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ('Float[ArrayLike, "*batch queries heads size"]', "float `[*B, T, H, D]`, that is `[*batch, queries, heads, size]`"),
        ('Float32[Array, "tokens _"] | Float64[Array, "tokens _"]', "float32 `[tokens, _]`"),
        ('int | Integer[ArrayLike, ""]', "`int` or integer scalar"),
        ('Literal["a", "b"]', "`'a'`, `'b'`"),
        ("tuple[Keys, str]", "tuple of ([`Keys`][ejkernel.typing.Keys], `str`)"),
    ],
)
def test_types_in_words(site, text, meaning):
    assert site.site_types.meaning(ast.parse(text, mode="eval").body, {"Keys"}) == meaning


def test_every_type_of_a_signature_is_on_the_page_of_types(site):
    page = site.site_types.types_page()
    assert all(f"#ejkernel.typing.{name} }}" in page for name in ("Queries", "Platforms", "DataclassConfig", "SampledLogprobs"))


def test_papers_are_linked(site):
    """In the sources of a docstring alone, the longest title, however the lines are broken."""
    linked = site.site_papers.linked
    url = "https://arxiv.org/abs/"
    assert linked(
        "FlashAttention.\n\nSource: Dao, FlashAttention-2, 2023; Dao et al.,\n    FlashAttention, 2022.\n\nFlashAttention"
    ) == (
        f"FlashAttention.\n\nSource: Dao, [FlashAttention-2]({url}2307.08691), 2023; Dao et al.,\n"
        f"    [FlashAttention]({url}2205.14135), 2022.\n\nFlashAttention"
    )
    assert linked("Source: Attention is\n  all you need.") == f"Source: [Attention is all you need]({url}1706.03762)."
    assert site.site_papers.sources("Nothing.\n\nSource: names as in vLLM.") == ""


def test_every_paper_is_named_by_a_docstring(site):
    text = " ".join(" ".join(path.read_text() for path in (ROOT / "ejkernel-core" / "src").rglob("*.py")).split())
    assert [title for title in site.site_papers.PAPERS if title not in text] == []


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


def test_measured_values_lose_their_marks(site):
    assert (
        site.without_marks("It takes\n<!--time-->4.2<!--/--> ms. <!-- a comment -->") == "It takes\n4.2 ms. <!-- a comment -->"
    )


def test_a_page_with_a_wide_table_leaves_its_contents_out(site):
    assert "toc" in site.front_matter("|" + "---|" * 8) and site.front_matter("| a |\n|---|\n") == ""
