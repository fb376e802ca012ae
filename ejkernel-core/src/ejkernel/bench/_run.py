"""Runs cases: everything that may run one is built, checked, and, if it is right, timed in turns with the others."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ejkernel import _dispatch
from ejkernel._explain import describe_call
from ejkernel._records import Candidate
from ejkernel._registry import kernel_registry
from ejkernel._target import target_of_device
from ejkernel._timing import repeats_for, seconds
from ejkernel.bench import _program, _provenance
from ejkernel.bench._clock import DeviceClock
from ejkernel.bench._limits import measure_limits
from ejkernel.bench._problem import BenchProblem, prepare
from ejkernel.bench._program import Program
from ejkernel.bench._result import Limits, described
from ejkernel.bench._select import select
from ejkernel.bench._settings import Settings
from ejkernel.bench.peers import Peer, wanted_peers
from ejkernel.tuning._problems import Error, pinned
from ejkernel.tuning._progress import Progress

SCHEMA = 1


@dataclasses.dataclass
class Run:
    """One implementation or peer, on its way through the benchmark of one phase of a case.

    Attributes:
        name: of the implementation or the peer.
        ours: whether it is one of ours.
        chosen: whether dispatch would pick it.
        config: and where it comes from, for ours.
        status: "ok", "refused", "wrong" or "failed"; the last three have a reason.
    """

    name: str
    ours: bool
    chosen: bool = False
    config: str | None = None
    tier: str | None = None
    status: str = "ok"
    reason: str | None = None
    program: Program | None = None
    errors: dict[str, Error] = dataclasses.field(default_factory=dict)
    wall: list[float] = dataclasses.field(default_factory=list)
    device: list[float] = dataclasses.field(default_factory=list)

    def end(self, status: str, reason: str) -> None:
        """Set aside, with the reason; nothing of it is timed."""
        self.status, self.reason, self.program = status, reason, None


def run(
    settings: Settings,
    *,
    command: str = "",
    progress: bool | None = None,
    each: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Run a benchmark.

    Args:
        settings: what to run.
        command: what the user typed, for the result.
        progress: show a progress bar; None = where stderr is a terminal.
        each: called with each case of the result as it is there.

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
    with Progress(progress, len(selected) * len(settings.phases)) as bar:
        for one in selected:
            base = prepare(one)
            for phase in settings.phases:
                case = _case(BenchProblem.of(one, phase, base), settings, peers, Limits.of(limits), clock, bar)
                cases.append(case)
                if each is not None:
                    each(case)
    timed_on_device = any(found["device_s"] for case in cases for found in case["runs"])
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _provenance.commit(),
        "command": command,
        "device": _provenance.describe_device(device),
        "versions": _provenance.versions(peers),
        "limits": limits,
        "settings": {
            "rounds": settings.rounds,
            "input_sets": settings.input_sets,
            "compile_rounds": settings.compile_rounds,
            "size": settings.size,
            "clock": "cupti" if timed_on_device else "wall",
            "no_device_clock": clock.reason or None,
        },
        "peers": {**{peer.name: None for peer in peers}, **missing},
        "cases": cases,
    }


def _case(
    problem: BenchProblem, settings: Settings, peers: Sequence[Peer], limits: Limits, clock: DeviceClock, bar: Progress
) -> dict[str, Any]:
    runs = _ours(problem, settings.platforms)
    served = [peer for peer in peers if problem.selected.operation in peer.operations]
    bar.begin(f"{problem.selected.operation} {problem.selected.case.name} {problem.title}", len(runs) + len(served))
    try:
        sets = [problem.first, *(problem.arguments(seed) for seed in range(1, settings.input_sets))]
    except Exception as error:  # noqa: BLE001 - an implementation that makes what backward reads
        sets = []
        for _, one in runs:
            one.end("failed", f"no arguments to run on: {first_line(error)}")
    for candidate, one in runs:
        _build(one, lambda candidate=candidate: _program.ours(problem, candidate, sets, settings.compile_rounds))
        _check(problem, one)
        bar.advance()
    found = [one for _, one in runs]
    for peer in served if sets else ():
        one = Run(peer.name, ours=False)
        _build(one, lambda peer=peer: peer.program(problem, sets, settings.compile_rounds))
        _check(problem, one)
        found.append(one)
        bar.advance()
    _time([one for one in found if one.program is not None], settings.rounds, clock)
    return described(problem, describe_call(problem.request.call), limits, found)


def _ours(problem: BenchProblem, platforms: Sequence[str]) -> list[tuple[Candidate, Run]]:
    """Every implementation of the phase, with dispatch's verdict on it."""
    saving = problem.phase == "backward"
    request = problem.request.saving_residuals() if saving else problem.request
    decision = _dispatch.decide(request, problem.phase)
    runs: list[tuple[Candidate, Run]] = []
    for verdict in decision.verdicts:
        candidate = verdict.candidate
        if platforms and not {candidate.id, candidate.platform} & {*platforms}:
            continue
        one = Run(candidate.id, ours=True, chosen=verdict.verdict == "chosen")
        alone = _dispatch.decide(pinned(problem.request, problem.phase, candidate, None), problem.phase)
        if alone.chosen is not candidate:
            judged = next(found for found in alone.verdicts if found.candidate is candidate)
            one.end("failed" if judged.verdict == "broken" else "refused", "; ".join(judged.reasons))
        elif alone.config is not None:
            one.config, one.tier = str(alone.config), alone.tier
        runs.append((candidate, one))
    return runs


def _build(run: Run, make: Callable[[], Program | str]) -> None:
    """Compile; a text is a refusal, and an exception is this run's failure."""
    if run.status != "ok":
        return
    try:
        made = make()
    except Exception as error:  # noqa: BLE001 - code of plugins, peers and compilers
        run.end("failed", first_line(error))
        return
    if isinstance(made, str):
        run.end("refused", made)
    else:
        run.program = made


def _check(problem: BenchProblem, run: Run) -> None:
    """Run once on the first inputs; what is not right is not timed."""
    program = run.program
    if program is None:
        return
    try:
        found = program.run(*program.sets[0])
        program.wait(found)
        run.errors = problem.errors(program.results(found))
    except Exception as error:  # noqa: BLE001 - a kernel that fails on the device
        run.end("failed", first_line(error))
        return
    if not run.errors:
        run.end("failed", "returned nothing that can be compared")
        return
    name, worst = max(run.errors.items(), key=lambda item: item[1].share)
    if worst.share > 1:
        what = f"gradient of {name}" if problem.phase == "backward" else name
        run.end("wrong", f"{what}: {worst.share:.3g} times the error that is tolerated, against {problem.expected[1]}")


def _time(runs: Sequence[Run], rounds: int, clock: DeviceClock) -> None:
    """Wall time in turns, then time on the device in turns."""
    programs = [(one, one.program) for one in runs if one.program is not None]
    repeats = {one.name: repeats_for(program.run, program.sets, program.wait) for one, program in programs}
    for turn in range(rounds):
        for one, program in programs:
            one.wall.append(seconds(program.run, program.sets, repeats[one.name], turn, program.wait))
    for turn in range(rounds):
        for one, program in programs:
            one.device += clock.samples(program, turn)


def first_line(error: Exception) -> str:
    """An exception in a line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300]
