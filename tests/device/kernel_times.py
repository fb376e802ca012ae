"""Device time by CUPTI, of a program and of its kernels."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import statistics
from typing import Any


def device_times(function: Any, arguments: tuple[Any, ...], repeats: int = 5) -> tuple[float, dict[str, float]]:
    """Median device time of a call in seconds, and of all launches of each of its kernels."""
    from jax.experimental.mosaic.gpu import profiler

    _, runs = profiler.Cupti(finalize=False).measure(function, iterations=repeats, aggregate=False)(*arguments)
    runs = runs if runs and isinstance(runs[0], list) else [runs]
    kernels: dict[str, list[float]] = {}
    for run in runs:
        sums: dict[str, float] = {}
        for name, milliseconds in run:
            sums[name] = sums.get(name, 0.0) + milliseconds / 1e3
        for name, seconds in sums.items():
            kernels.setdefault(name, []).append(seconds)
    total = statistics.median(sum(milliseconds for _, milliseconds in run) / 1e3 for run in runs)
    return total, {name: statistics.median(found) for name, found in kernels.items()}
