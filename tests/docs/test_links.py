"""Links between pages lead somewhere, and evidence stays out of the user's pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
PAGES = sorted(
    {*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("ejkernel-*/README.md"), *ROOT.glob("examples/*/README.md")}
)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """The links of a page whose file or heading does not exist."""
    found = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if link.startswith(("https://", "http://")):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_links(page):
    assert broken(page) == []


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `b`: c\n\n[1](#a-b-c) [2](#d) [3](missing.md) [4](page.md#d) [5](https://example.org/x)\n")
    assert broken(page) == ["#d", "missing.md", "page.md#d"]


def test_evidence_has_a_section_of_its_own():
    index = (DOCS / "index.md").read_text()
    before, _, evidence = index.partition("\n## Evidence\n")
    assert "evidence/" not in before
    linked = {(DOCS / target).resolve() for target in re.findall(r"\]\((evidence/[^)#]+\.md)\)", evidence)}
    assert linked == {*(DOCS / "evidence").glob("*.md")}
