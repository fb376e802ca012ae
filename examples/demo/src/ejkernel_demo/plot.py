"""The demo's pictures: the loss curves, in a file beside both speeds and on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


def save_plot(path: Path, curves: Mapping[str, Sequence[float]], seconds: Mapping[str, Sequence[float]], title: str) -> None:
    """Write a PNG of loss curves and step times, keyed by the name of the run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)  # no window system and no global state
    losses, speed = figure.subplots(1, 2, width_ratios=(3, 1))
    for (name, values), style in zip(curves.items(), ("-", "--"), strict=False):
        losses.plot(np.arange(1, len(values) + 1), values, style, label=name, linewidth=1.6)
    losses.axhline(np.log(256), color="0.6", linewidth=0.8)
    steps = max(map(len, curves.values()))
    losses.text(steps, np.log(256), "uniform guess, ln 256", ha="right", va="bottom", color="0.4")
    losses.set(xlabel="step", ylabel="loss, nats per byte", title=title)
    losses.legend(loc="center right")
    names = list(seconds)
    low, middle, high = 1e3 * np.transpose([np.quantile(seconds[name], (0.25, 0.5, 0.75)) for name in names])
    speed.bar(names, middle, yerr=(middle - low, high - middle), color=["C0", "C1"][: len(names)], width=0.6, capsize=4)
    speed.set(ylabel="step time, ms (median, quartiles)", title="speed")
    figure.savefig(path, dpi=130)


def drawn_curves(curves: Mapping[str, Sequence[float]], width: int, height: int = 14) -> str:
    """Loss curves in characters, without colours; the first is drawn over the others.

    Args:
        curves: by the name of the run.
        width: columns.
        height: lines.
    """
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    right = max(map(len, curves.values()))
    steps = sorted({1, *(round(part * right / 4) or 1 for part in range(1, 5))})
    figure.ruler("lower").ticks(steps, [*map(str, steps)])
    figure.legend(x=right, y=max(map(max, curves.values())), ha="right", va="top", relative=True)
    for (name, values), mark in reversed([*zip(curves.items(), ("braille", "o"), strict=False)]):
        signal = figure.signal([*range(1, len(values) + 1)], [*values], marker=mark)
        signal.label(name)
        figure.draw(signal)
    return str(plotext.uncolorize(str(figure.build()))).rstrip()
