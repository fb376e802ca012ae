"""HTML for notebooks: tables that take the colours of the page, light or dark, and need nothing from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_CELL = "text-align:left;vertical-align:top;padding:0.1em 0.8em 0.1em 0;border:0;background:none;color:inherit"


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], strong: Iterable[int] = ()) -> str:
    """A table with a caption.

    Args:
        title: its caption.
        header: names of the columns.
        rows: their cells.
        strong: indices of rows to set in bold.
    """
    bold = {*strong}
    lines = [_row("th", header)]
    lines += [_row("td", row, ";font-weight:bold" if index in bold else "") for index, row in enumerate(rows)]
    caption = f'<caption style="text-align:left;color:inherit">{html.escape(title)}</caption>'
    return f'<table style="border-collapse:collapse;color:inherit;background:none">{caption}{"".join(lines)}</table>'


def _row(tag: str, cells: Sequence[str], style: str = "") -> str:
    made = "".join(f'<{tag} style="{_CELL}{style}">{html.escape(cell)}</{tag}>' for cell in cells)
    return f'<tr style="background:none">{made}</tr>'


def picture(shares: Sequence[Sequence[float]], label: str, size: int = 8) -> str:
    """A grid of squares as SVG, each as opaque as its share from 0 to 1 says.

    Args:
        shares: rows of numbers.
        label: what screen readers say in its place.
        size: side of a square, in pixels.
    """
    width, height = size * max(map(len, shares), default=0), size * len(shares)
    squares = "".join(
        f'<rect x="{size * x}" y="{size * y}" width="{size}" height="{size}" fill-opacity="{share:.2g}"/>'
        for y, row in enumerate(shares)
        for x, share in enumerate(row)
        if share
    )
    frame = f'<rect width="{width}" height="{height}" fill="none" stroke="currentColor" stroke-opacity="0.5"/>'
    label = html.escape(label)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" fill="currentColor"><title>{label}</title>{squares}{frame}</svg>'
    )
