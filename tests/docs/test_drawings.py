"""What README draws and tabulates is what the library does and what was recorded."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import MaskInfo

ROOT = Path(__file__).parents[2]
WIDTH = 37

DRAWN = {
    "causal=True (query 0 sees key 0)": (MaskInfo(causal=True), 5),
    'causal_alignment="bottom_right"': (MaskInfo(causal=True, causal_offset=2), 3),
    "sliding_window=(1, 0)": (MaskInfo(window=(1, 0)), 5),
    "sliding_window=1, that is (1, 1)": (MaskInfo(window=1), 5),
    "chunk_size=2, causal=True": (MaskInfo(chunk_size=2, causal=True), 5),
    "segments [0, 0, 1, 1, -1]": (MaskInfo.from_segments(jnp.array([[0, 0, 1, 1, -1]])), 5),
}


def drawings() -> dict[str, np.ndarray]:
    """The matrices of README by their titles: three side by side, two rows of them."""
    block = re.search(r"^```text\n(causal=True.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block, "README draws no masks"
    found = {}
    for row in block[1].split("\n\n"):
        lines = [line.ljust(3 * WIDTH) for line in row.splitlines()]
        for column in range(3):
            title, _, *rows = (line[column * WIDTH : (column + 1) * WIDTH].strip() for line in lines)
            found[title] = np.array([[int(bit) for bit in text.partition("|")[2].split()] for text in rows if text])
    return found


@pytest.mark.parametrize("title", DRAWN)
def test_drawn_mask(title):
    mask_info, queries = DRAWN[title]
    assert np.array_equal(drawings()[title], np.asarray(mask_info.materialize(queries, 5))[0, 0])


def test_nothing_else_is_drawn():
    assert drawings().keys() == DRAWN.keys()


@pytest.mark.parametrize("tool", ["generated_tables", "draw_masks", "draw_peers"])
def test_tables_and_pictures_are_up_to_date(tool):
    check = subprocess.run(
        [sys.executable, str(ROOT / "tools" / f"{tool}.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stderr
