"""Wall-clock time of programs that run asynchronously; what the tuner and the benchmarks share."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

LEAST_SECONDS = 2e-3
"""A timed run is repeated until it takes this long, so that the clock and the dispatch of one call do not decide."""

MOST_REPEATS = 100


def repeats_for(program: Callable[..., Any], sets: Sequence[Any], wait: Callable[[Any], Any] = jax.block_until_ready) -> int:
    """How often a program must run for a timing to be worth something."""
    once = seconds(program, sets, 1, 0, wait)
    return max(1, min(MOST_REPEATS, round(LEAST_SECONDS / max(once, 1e-9))))


def seconds(
    program: Callable[..., Any],
    sets: Sequence[Any],
    repeats: int,
    turn: int,
    wait: Callable[[Any], Any] = jax.block_until_ready,
) -> float:
    """Seconds per run, without waiting in between: dispatch overlaps with work as in a program.

    Args:
        program: called with each of the sets of arguments in turn, from number `turn` on.
        sets: sets of arguments.
        repeats: how many runs share the clock.
        turn: which set comes first.
        wait: returns when its argument, the list of results, is computed.
    """
    rotation = itertools.islice(itertools.cycle(sets), turn % len(sets), turn % len(sets) + repeats)
    start = time.perf_counter()
    results = [program(*arguments) for arguments in rotation]
    wait(results)
    return (time.perf_counter() - start) / repeats
