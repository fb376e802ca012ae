"""The documentation site as it was built: every public name is described, links lead somewhere, nothing comes from elsewhere."""

from __future__ import annotations

import html.parser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import ejkernel
import ejkernel.plugin


class Page(html.parser.HTMLParser):
    """Identifiers, links, and what a browser loads with the page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.identifiers: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        given = {name: value for name, value in attrs if value is not None}
        self.identifiers |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("script", "img", "link", "iframe") and given.get("rel") not in ("canonical", "prev", "next"):
            self.loaded += [given[name] for name in ("src", "href") if name in given]


def pages(site: Path) -> dict[Path, Page]:
    found = {path.resolve(): Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(found) > 30
    return found


def test_links(site):
    found = pages(site)
    dead = []
    for path, page in found.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchored = not parts.fragment or target not in found or unquote(parts.fragment) in found[target].identifiers
            if not target.exists() or not anchored:
                dead.append(f"{path.relative_to(site)}: {link}")
    assert not dead, "\n".join(dead)


def test_nothing_is_fetched_from_elsewhere(site):
    elsewhere = {link for page in pages(site).values() for link in page.loaded if urlsplit(link).scheme not in ("", "data")}
    assert elsewhere == set()


def test_every_public_name_is_described(site):
    described = set().union(*(page.identifiers for path, page in pages(site).items() if path.parent.name == "reference"))
    names = {f"ejkernel.{name}" for name in ejkernel.__all__ if name != "__version__"}
    names |= {f"ejkernel.plugin.{name}" for name in ejkernel.plugin.__all__}
    missing = {
        name for name in names if name not in described and f"ejkernel.modules.operations.configs{name[8:]}" not in described
    }
    assert missing == set()


def test_common_entries_are_shown(site):
    """What `public` adds to docstrings stands in no source that the site's reader finds."""
    page = (site / "reference" / "rows.html").read_text()
    described = page.split('id="ejkernel.rms_norm"')[1].split('id="ejkernel.')[0]
    assert "one platform, or several in order of preference" in described
    assert "no admitted platform supports the call" in described
