"""A folder that holds everything: the page and the pictures."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ejkernel_bench._document import Document, as_document
from ejkernel_bench.report._canvas import NEEDS
from ejkernel_bench.report.page import write_page
from ejkernel_bench.report.plots import write_plots

PAGE = "index.html"


def write(result: Document | Mapping[str, Any], folder: str | Path) -> list[Path]:
    """Write `index.html`, `overview.png` and a picture for each operation; returns the paths, the page first.

    Args:
        result: a recorded run, or the JSON of one.
        folder: made if it is not there.

    Raises:
        ValueError: `result` is not a recorded run.
        ImportError: matplotlib is not installed; the page is written all the same.
    """
    document = as_document(result)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return [write_page(document, folder / PAGE), *write_plots(document, folder)]


def missing() -> str | None:
    """What must be installed before pictures can be drawn, in one sentence; None when nothing."""
    return NEEDS if importlib.util.find_spec("matplotlib") is None else None
