"""What the pictures share: figures without a window system, colours, shapes, and the sentence where matplotlib is missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ejkernel.errors import EjkernelError
from ejkernel_bench._document import Case, run_kinds

COLOURS = (
    "#0072b2",
    "#cc8400",
    "#009e73",
    "#c05a94",
    "#5b3fa0",
    "#7a5c1e",
    "#6e7781",
    "#8f1d1d",
    "#3f7d20",
    "#379bd2",
    "#8a2f7d",
    "#2f4b7c",
)
"""Of runs; shapes and names tell what colours do not. Orange-red is kept for losses."""

PEER_SHAPES = ("s", "^", "D", "v")
LOSS, SOFT, LINE, TEXT = "#c2410c", "#59636e", "#d8dee4", "#1b1f24"
NEEDS = 'plots need matplotlib; install it with: pip install "ejkernel-bench[plots]"'
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "text.color": TEXT,
    "xtick.color": SOFT,
    "ytick.color": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "ytick.major.size": 0,
}


class MissingPlotterError(EjkernelError, ImportError):
    """Pictures were asked for and matplotlib is not installed."""


def figure(width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """A figure in inches and its axes, as `Figure.subplots(**options)` makes them."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPlotterError(NEEDS) from error
    with rc_context(STYLE):
        made = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(made)  # no window system and no global state
        return made, made.subplots(**options)


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two positive ones, few enough for their labels."""
    spread = math.log(high / low)
    steps = (
        (1, 1.2, 1.5, 2, 3, 5, 7)
        if spread < 1.2
        else (1, 1.5, 2, 3, 5, 7)
        if spread < 2
        else (1, 2, 5)
        if spread < 4
        else (1, 3)
    )
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [step * 10.0**power for power in powers for step in (steps if spread < 8 else (1,))]
    return [tick for tick in found if low <= tick <= high]


def save(made: Any, path: Path) -> Path:
    """Write a PNG that holds no date, so that the same data gives the same file."""
    made.savefig(path, dpi=110, metadata={"Software": None})
    return path


def marks(cases: Sequence[Case]) -> dict[str, dict[str, Any]]:
    """Name of a run -> its colour and shape, ours first. Ours are round, peers have corners."""
    kinds = run_kinds(cases)
    peers = [name for name, kind in kinds.items() if kind == "peer"]
    shapes = {name: PEER_SHAPES[index % len(PEER_SHAPES)] for index, name in enumerate(peers)}
    return {name: {"color": COLOURS[index % len(COLOURS)], "marker": shapes.get(name, "o")} for index, name in enumerate(kinds)}
