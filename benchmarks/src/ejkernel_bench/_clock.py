"""Time on the device, by JAX's profiler; wherever it sees no device, there is none."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ejkernel.errors import in_one_line
from ejkernel_bench._program import Program

_DEVICES, _STREAMS = "/device:GPU", "Stream"
_COPIES = ("Memcpy", "Memset")


class _Event(NamedTuple):
    """A kernel on the device, in nanoseconds."""

    begin: float
    end: float
    name: str


class DeviceClock:
    """Measures how long the device is busy with the kernels of a run, whoever started them.

    Those that run beside each other, as one does that begins while the one before ends, count once, for the run that was first.
    Pauses between them, which are the host's, do not count, nor do copies: of an array that a caller would have donated, or that is
    returned under two names.

    Attributes:
        reason: why there are no times; empty while there are.
    """

    def __init__(self, backend: str) -> None:
        self.reason = "" if backend == "gpu" else f"there is no device clock for {backend}"

    def samples(self, program: Program, turn: int) -> list[float]:
        """Seconds on the device of one run with each set of arguments, after one run that is not counted; none if unknown."""
        if self.reason:
            return []
        count = len(program.sets)
        try:
            _run(program, turn, 1)
            events = _traced(program, turn + 1, count)
        except Exception as error:  # noqa: BLE001 - an optional instrument; the reason goes to the result and wall time stays
            self.reason = in_one_line(error)
            return []
        each = len(events) // count
        runs = [events[each * run : each * (run + 1)] for run in range(count)]
        alike = each * count == len(events) and len({tuple(sorted(event.name for event in run)) for run in runs}) == 1
        return [1e-9 * nanoseconds for nanoseconds in _busy(runs)] if each and alike else []


def _run(program: Program, turn: int, count: int) -> None:
    """One after the other on the device, without a wait in between."""
    for found in [program.run(*program.sets[index % len(program.sets)]) for index in range(turn, turn + count)]:
        program.wait(found)


def _traced(program: Program, turn: int, count: int) -> list[_Event]:
    """What ran on the device meanwhile, in the order of its beginning."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            _run(program, turn, count)
        finally:
            jax.profiler.stop_trace()
        return sorted(event for path in pathlib.Path(folder).rglob("*.xplane.pb") for event in _events(path))


def _events(path: pathlib.Path) -> list[_Event]:
    profile: Any = jax.profiler.ProfileData.from_file(str(path))
    return [
        _Event(event.start_ns, event.start_ns + event.duration_ns, event.name)
        for plane in profile.planes
        if plane.name.startswith(_DEVICES)
        for line in plane.lines
        if line.name.startswith(_STREAMS)
        for event in line.events
        if not event.name.startswith(_COPIES)
    ]


def _busy(runs: Sequence[Sequence[_Event]]) -> list[float]:
    """Nanoseconds in which any kernel of a run ran, and none from before it."""
    found, until = [], float("-inf")
    for run in runs:
        total = 0.0
        for event in run:
            total += max(event.end - max(event.begin, until), 0.0)
            until = max(until, event.end)
        found.append(total)
    return found
