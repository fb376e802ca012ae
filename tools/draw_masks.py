"""Draw the masks of docs/masks.md: each picture NAME.svg shows the `MaskInfo` that the page's code calls NAME.

python tools/draw_masks.py            write docs/pictures
python tools/draw_masks.py --check    exit 1 if a picture is out of date
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
from pictures import write_or_check

from ejkernel import MaskInfo

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "masks.md"
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]+\]\(pictures/(\w+)\.svg\)")
CELL = 16
"""Pixels of a cell."""


def masks() -> dict[str, np.ndarray]:
    """Name of a picture -> visibility `[T, S]`, from the code of the page."""
    text = PAGE.read_text()
    names: dict[str, object] = {}
    for block in CODE.findall(text):
        exec(compile(block, str(PAGE), "exec"), names)
    found: dict[str, np.ndarray] = {}
    for name in PICTURE.findall(text):
        mask = names[name]
        assert isinstance(mask, MaskInfo), name
        found[name] = np.asarray(mask.materialize())[0, 0]
    return found


def picture(visible: np.ndarray) -> str:
    """A grid of cells that a light and a dark page can show; visible ones are filled."""
    rows, columns = visible.shape
    width, height = CELL * columns, CELL * rows
    cells = [f"M{CELL * column} {CELL * row}h{CELL}v{CELL}h-{CELL}z" for row, column in np.argwhere(visible)]
    lines = [f"M{CELL * column} 0v{height}" for column in range(columns + 1)]
    lines += [f"M0 {CELL * row}h{width}" for row in range(rows + 1)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 2}" height="{height + 2}" '
        f'viewBox="-1 -1 {width + 2} {height + 2}">\n'
        f'<path fill="#4a6fd4" d="{"".join(cells)}"/>\n<path stroke="#9a9a9a" d="{"".join(lines)}"/>\n</svg>\n'
    )


def main() -> int:
    wanted = {f"{name}.svg": picture(visible) for name, visible in masks().items()}
    return write_or_check(PAGE.parent / "pictures", wanted, "tools/draw_masks.py", __doc__)


if __name__ == "__main__":
    sys.exit(main())
