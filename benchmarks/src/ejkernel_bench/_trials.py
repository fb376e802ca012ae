"""One phase of one case: everything that may run it is built, checked, and, if it is right, timed in turns with the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ejkernel.errors import in_one_line
from ejkernel.testing.dispatch import Candidate, decide, pinned
from ejkernel.tuning.progress import Progress
from ejkernel.utils.timing import repeats_for, seconds
from ejkernel_bench import _program
from ejkernel_bench._clock import DeviceClock
from ejkernel_bench._problem import BenchProblem
from ejkernel_bench._program import Program
from ejkernel_bench._result import Limits, described
from ejkernel_bench._settings import Settings
from ejkernel_bench._trial import Trial
from ejkernel_bench.peers import Peer

Make = Callable[[Sequence[Any]], "Program | str"]
"""From sets of arguments to a program, or to the reason why there is none."""


def bench_case(
    problem: BenchProblem, settings: Settings, peers: Sequence[Peer], limits: Limits, clock: DeviceClock, bar: Progress
) -> dict[str, Any]:
    """Run one phase of a case; returns its part of the result."""
    makers = _ours(problem, settings) + _peers(problem, settings, peers)
    bar.begin(f"{problem.selected.operation} {problem.selected.case.name} {problem.title}", len(makers))
    trials = [trial for trial, _ in makers]
    try:
        sets = [problem.first, *(problem.arguments(seed) for seed in range(1, settings.input_sets))]
    except Exception as error:  # noqa: BLE001 - of the implementation that makes what backward reads
        for trial in trials:
            trial.end("failed", f"no arguments to run it on: {in_one_line(error)}")
        return described(problem, limits, trials)
    for trial, make in makers:
        _guarded(trial, lambda trial=trial, make=make: _build_and_check(problem, trial, make, sets))
        bar.advance()
    _time(trials, settings.rounds, clock)
    return described(problem, limits, trials)


def _ours(problem: BenchProblem, settings: Settings) -> list[tuple[Trial, Make]]:
    """Every implementation of the phase, with dispatch's verdict on it."""
    request = problem.request.saving_residuals() if problem.phase == "backward" else problem.request
    decision = decide(request, problem.phase)
    found: list[tuple[Trial, Make]] = []
    for verdict in decision.verdicts:
        candidate = verdict.candidate
        if settings.platforms and not {candidate.id, candidate.platform} & {*settings.platforms}:
            continue
        trial = Trial(candidate.id, ours=True, chosen=verdict.verdict == "chosen")
        _ask(problem, candidate, trial)
        found.append((trial, _maker(problem, candidate, settings.compile_rounds)))
    return found


def _ask(problem: BenchProblem, candidate: Candidate, trial: Trial) -> None:
    """Whether the implementation would run if it alone were asked for, and with which config."""
    decision = decide(pinned(problem.request, problem.phase, candidate, None), problem.phase)
    if decision.chosen is not candidate:
        verdict = next(one for one in decision.verdicts if one.candidate is candidate)
        trial.end("failed" if verdict.verdict == "broken" else "refused", "; ".join(verdict.reasons))
    elif decision.config is not None:
        trial.config, trial.tier = str(decision.config), decision.tier


def _maker(problem: BenchProblem, candidate: Candidate, rounds: int) -> Make:
    return lambda sets: _program.ours(problem, candidate, sets, rounds)


def _peers(problem: BenchProblem, settings: Settings, peers: Sequence[Peer]) -> list[tuple[Trial, Make]]:
    def maker(peer: Peer) -> Make:
        return lambda sets: peer.program(problem, sets, settings.compile_rounds)

    serving = [peer for peer in peers if problem.selected.operation in peer.operations]
    return [(Trial(peer.name, ours=False), maker(peer)) for peer in serving]


def _guarded(trial: Trial, step: Callable[[], None]) -> None:
    """Take a step; what it raises is this run's failure and nobody else's."""
    if trial.status != "ok":
        return
    try:
        step()
    except Exception as error:  # noqa: BLE001 - code of plugins, peers, compilers and devices
        trial.end("failed", in_one_line(error))


def _build_and_check(problem: BenchProblem, trial: Trial, make: Make, sets: Sequence[Any]) -> None:
    """Compile, and run once on the first inputs; what is not right is not timed."""
    program = make(sets)
    if isinstance(program, str):
        trial.end("refused", program)
        return
    found = program.run(*program.sets[0])
    program.wait(found)
    trial.errors = problem.errors(program.results(found))
    if not trial.errors:
        trial.end("failed", "returned nothing that can be compared")
        return
    name, worst = max(trial.errors.items(), key=lambda item: item[1].share)
    if worst.share > 1:
        what = f"gradient of {name}" if problem.phase == "backward" else name
        trial.end("wrong", f"{what}: {worst.share:.3g} times the error that is tolerated, against {problem.expected[1]}")
        return
    trial.program = program


def _time(trials: Sequence[Trial], rounds: int, clock: DeviceClock) -> None:
    """Wall time in turns, then time on the device in turns."""
    repeats: dict[str, int] = {}

    def count(trial: Trial, program: Program, turn: int) -> None:
        repeats[trial.name] = repeats_for(program.run, program.sets, program.wait)

    def wall(trial: Trial, program: Program, turn: int) -> None:
        trial.wall.append(seconds(program.run, program.sets, repeats[trial.name], turn, program.wait))

    def device(trial: Trial, program: Program, turn: int) -> None:
        trial.device += clock.samples(program, turn)

    for measure, turns in ((count, 1), (wall, rounds), (device, rounds)):
        for turn in range(turns):
            for trial in trials:
                program = trial.program
                if program is not None:
                    _guarded(
                        trial, lambda measure=measure, trial=trial, program=program, turn=turn: measure(trial, program, turn)
                    )
