"""What the search of the site finds first: its index as zensical wrote it, put in order.

The search ranks by where the words stand in a title, then in a text, and among equals by the order of the index. So pages that
explain come before the reference, and both before what was measured; titles of notes say that they are notes; and every
environment variable has an entry of its own.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from ejkernel._plugins.settings import VARIABLES

ORDER = ("words.html", "environment.html", "", "reference/", "measurements/", "evidence/", "CHANGELOG.html")
"""Beginnings of places, those that come first ahead; "" is every other page."""

NOTES = {"evidence/": "Evidence", "CHANGELOG.html": "Changelog"}
"""Beginnings of places whose titles say what they are."""


def put_in_order(index: Path) -> None:
    """Rewrite an index."""
    content = json.loads(index.read_text())
    content["items"] = ordered(content["items"])
    index.write_text(json.dumps(content))


def ordered(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of an index, with those of the variables."""
    found = [*map(_variable, VARIABLES), *map(_entry, items)]
    return sorted(found, key=_rank)


def _rank(item: dict[str, Any]) -> int:
    named = (place for place, beginning in enumerate(ORDER) if beginning and item["location"].startswith(beginning))
    return next(named, ORDER.index(""))


def _entry(item: dict[str, Any]) -> dict[str, Any]:
    place = item["location"]
    for beginning, word in NOTES.items():
        if place.startswith(beginning) and not item["title"].startswith(word):
            return {**item, "title": f"{word}: {item['title']}"}
    if place.startswith("measurements/"):  # below its heading are marks and commands, in which every word occurs
        return {**item, "text": "" if "#" in place else item["text"], "path": item["path"][:1]}
    return item


def _variable(one: Any) -> dict[str, Any]:
    return {
        "location": f"environment.html#{one.name.lower()}",
        "level": 2,
        "title": one.name,
        "text": re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(one.meaning)),
        "path": ["Start", "Environment variables"],
        "tags": [],
    }
