"""A whole benchmark: the cases that are asked for, with limits before and provenance after."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import jax

from ejkernel import kernel_registry
from ejkernel.targets import target_of_device
from ejkernel.tuning.progress import Progress
from ejkernel_bench import provenance
from ejkernel_bench._clock import DeviceClock
from ejkernel_bench._document import SCHEMA
from ejkernel_bench._limits import measure_limits
from ejkernel_bench._problem import BenchProblem, prepare
from ejkernel_bench._result import Limits
from ejkernel_bench._select import select
from ejkernel_bench._settings import Settings
from ejkernel_bench._trials import bench_case
from ejkernel_bench.peers import wanted_peers


class _Interruption:
    """A block that Ctrl-C ends, and nothing more."""

    happened = False

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.happened = kind is not None and issubclass(kind, KeyboardInterrupt)
        return self.happened


def run(
    settings: Settings,
    *,
    command: str = "",
    progress: bool | None = None,
    each: Callable[[dict[str, Any]], None] | None = None,
    save: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Run a benchmark. Interrupted, it returns the cases that were complete.

    Args:
        settings: what to run.
        command: what the user typed, for the result.
        progress: show a progress bar; None = where stderr is a terminal.
        each: called with each case of the result as it is there.
        save: called with the result so far after each case, so that a process that is killed has lost one; it says `interrupted`.

    Returns:
        The result, as JSON may hold it: device, versions, limits, and every sample of every run.
    """
    device = jax.local_devices()[0]
    backend = target_of_device(device).backend
    settings = settings.on(backend)
    for platform in settings.platforms:
        kernel_registry.check_platform("--platform", platform.partition(".")[0])
    selected = select(settings)
    peers, missing = wanted_peers(settings.peers)
    clock = DeviceClock(backend)
    limits = measure_limits(settings.dtypes, backend)
    cases: list[dict[str, Any]] = []
    interrupted = _Interruption()
    commit, versions = provenance.commit(), provenance.versions(peers)

    def result(*, complete: bool) -> dict[str, Any]:
        timed_on_device = any(found["device_s"] for case in cases for found in case["runs"])
        return {
            "schema": SCHEMA,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": commit,
            "command": command,
            "device": provenance.describe_device(device),
            "versions": versions,
            "limits": limits,
            "settings": {
                "rounds": settings.rounds,
                "input_sets": settings.input_sets,
                "compile_rounds": settings.compile_rounds,
                "size": settings.size,
                "clock": "profiler" if timed_on_device else "wall",
                "no_device_clock": clock.reason or None,
                "interrupted": not complete,
            },
            "peers": {**{peer.name: None for peer in peers}, **missing},
            "cases": cases,
        }

    with interrupted, Progress(progress, len(selected) * len(settings.phases)) as bar:
        for one in selected:
            base = prepare(one)
            for phase in settings.phases:
                case = bench_case(BenchProblem.of(one, phase, base), settings, peers, Limits.of(limits), clock, bar)
                cases.append(case)
                if each is not None:
                    with bar.paused():
                        each(case)
                if save is not None:
                    save(result(complete=False))
    return result(complete=not interrupted.happened)
