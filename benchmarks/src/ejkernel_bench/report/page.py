"""One HTML file with interactive charts: no network, no dependency, nothing from the data is ever markup."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from ejkernel_bench._document import Document, as_document
from ejkernel_bench.report._content import content


def write_page(result: Document | Mapping[str, Any], path: str | Path) -> Path:
    """Write the page of a recorded run; returns where."""
    path = Path(path)
    path.write_text(page_html(result), encoding="utf-8")
    return path


def page_html(result: Document | Mapping[str, Any]) -> str:
    """The page. Its policy lets the browser run this one script and load nothing."""
    parts = files("ejkernel_bench.report")
    script, style = ((parts / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    shown = content(as_document(result))
    filled = {
        "TITLE": html.escape(shown["title"]),
        "SCRIPT_HASH": _digest(script),
        "STYLE_HASH": _digest(style),
        "STYLE": style,
        "DATA": _embedded(shown),
        "SCRIPT": script,
    }
    text = (parts / "page.html").read_text(encoding="utf-8")
    pieces = text.split("@@")  # text and names of slots by turns, so that what fills one is never searched for others
    return "".join(filled[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def _embedded(value: object) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    """How a policy names the script or style that it allows."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
