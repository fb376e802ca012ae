"""The tuner: every config of every implementation that may run a call, checked first, then timed against the others.

Nothing is timed while tracing, and nothing that gave wrong numbers is timed at all: it is quarantined. Times are wall-clock medians
of rounds in which the candidates take turns, over several sets of arguments, so that a machine that slows down hurts all alike.
The fastest of many is partly the luckiest of many, so it must beat the heuristic's config once more, in rounds of the two alone.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from ejkernel._dispatch.recording import RecordedCall
from ejkernel._plugins.records import Candidate
from ejkernel.configs.entry import Check, Entry, Timing
from ejkernel.configs.key import Key
from ejkernel.configs.quarantine import Quarantined, QuarantineFilter, add, lift
from ejkernel.configs.question import Question
from ejkernel.configs.result import AutotuningResult
from ejkernel.configs.spaces import to_plain
from ejkernel.errors import EjkernelWarning, in_one_line, invalid, warn
from ejkernel.tuning.problems import TuningProblem
from ejkernel.tuning.progress import Progress
from ejkernel.utils.timing import repeats_for, seconds

_WORTH = 0.97
"""A config replaces the heuristic's if it takes less than this share of its time: below, the difference may be noise."""


@dataclasses.dataclass
class _Trial:
    """One implementation with one config, on its way through the tuner."""

    candidate: Candidate
    config: Any
    program: Any = None
    repeats: int = 1
    check: Check | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)
    failure: str = ""
    was_quarantined: bool = False
    lasting: bool = False
    """Whether it failed here, and not for want of memory, which may be another process's doing."""

    def fail(self, error: Exception) -> None:
        self.failure = in_one_line(error)
        self.lasting = not (isinstance(error, MemoryError) or "Out of memory" in self.failure)

    @property
    def timing(self) -> Timing:
        return Timing(to_plain(self.config), tuple(self.seconds), self.failure)


@dataclasses.dataclass(frozen=True)
class Search:
    """A `Tuner` that tries the whole search space of every implementation.

    Attributes:
        rounds: timed runs of each config that is left.
        input_sets: sets of random arguments that timed runs rotate over.
        keep_within: after the first round, configs slower than this many times the best are not timed further.
        workers: threads that compile; None = one per core, at most 8.
        progress: show a progress bar; None = where stderr is a terminal.
        store: write the entries of each call to the user's cache as soon as they are found.
        retry: also try configs that are quarantined because they failed on this machine; what passes is so no more.
    """

    rounds: int = 5
    input_sets: int = 2
    keep_within: float = 3.0
    workers: int | None = None
    progress: bool | None = None
    store: bool = False
    retry: bool = False

    def __post_init__(self) -> None:
        for name in ("rounds", "input_sets", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise invalid(name, value, "a value >= 1")
        if self.keep_within < 1:
            raise invalid("keep_within", self.keep_within, "a value >= 1")

    def tune(self, calls: Sequence[RecordedCall]) -> AutotuningResult:
        """The fastest configs among those whose results match the reference."""
        problems = dict.fromkeys(TuningProblem(call.request, call.phase, _device_for(call)) for call in calls)
        result = AutotuningResult()
        with Progress(self.progress, len(problems)) as progress:
            for problem in problems:
                entries = self._tune(problem, progress)
                if self.store:
                    AutotuningResult(entries).store()
                result = result | AutotuningResult(entries)
        return result

    def _tune(self, problem: TuningProblem, progress: Progress) -> tuple[Entry, ...]:
        trials = _trials(problem, self.retry)
        progress.begin(str(problem), len(trials))
        try:
            sets = [problem.first, *(problem.arguments(seed) for seed in range(1, self.input_sets))]
            _ = problem.expected  # here, so that a failure of the reference is not laid to a config
        except Exception as error:  # noqa: BLE001 - without inputs or a reference nothing can be said of any config
            warn(f"autotune: {problem} left alone: {in_one_line(error)}", EjkernelWarning)
            return ()
        self._compile(problem, [trial for trial in trials if not trial.failure])
        for trial in trials:
            _verify(problem, trial)
            progress.advance()
        _quarantine(problem, trials)
        self._time([trial for trial in trials if not trial.failure], sets, progress)
        groups: dict[Candidate, list[_Trial]] = {}
        for trial in trials:
            groups.setdefault(trial.candidate, []).append(trial)
        winners = {candidate: self._winner(group, sets) for candidate, group in groups.items()}
        for trial in trials:
            trial.program = None
        return _entries(problem, groups, winners)

    def _compile(self, problem: TuningProblem, trials: list[_Trial]) -> None:
        def compile_one(trial: _Trial) -> None:
            try:
                trial.program = problem.program(trial.candidate, trial.config).lower(*problem.first).compile()
            except Exception as error:  # noqa: BLE001 - code of plugins and compilers; recorded as this config's failure
                trial.fail(error)

        with ThreadPoolExecutor(self.workers or min(os.cpu_count() or 1, 8)) as pool:
            list(pool.map(compile_one, trials))

    def _time(self, trials: list[_Trial], sets: list[Any], progress: Progress) -> None:
        for trial in trials:
            trial.repeats = repeats_for(trial.program, sets)
        for turn in range(self.rounds):
            best = min((min(trial.seconds, default=float("inf")) for trial in trials), default=0.0)
            for trial in trials:
                if not turn or min(trial.seconds) <= self.keep_within * best:
                    trial.seconds.append(seconds(trial.program, sets, trial.repeats, turn))
            progress.best(_leader(trials))

    def _winner(self, group: list[_Trial], sets: list[Any]) -> _Trial | None:
        """The fastest that is right; the heuristic's config, which comes first, unless that is clearly slower twice."""
        right = [trial for trial in group if not trial.failure]
        if not right:
            return None
        best, first = min(right, key=lambda trial: trial.timing.median), group[0]
        if best is first or first.failure:
            return best
        if best.timing.median > _WORTH * first.timing.median:
            return first
        return best if self._wins(best, first, sets) else first

    def _wins(self, challenger: _Trial, first: _Trial, sets: list[Any]) -> bool:
        """Whether it is clearly faster once more, now turn by turn against the heuristic's config alone."""
        ratios: list[float] = []
        for turn in range(2 * self.rounds):
            found: dict[str, float] = {}
            for name, trial in (("challenger", challenger), ("first", first))[:: -1 if turn % 2 else 1]:
                found[name] = seconds(trial.program, sets, trial.repeats, turn)
                trial.seconds.append(found[name])
            ratios.append(found["challenger"] / found["first"])
        return statistics.median(ratios) <= _WORTH


def _device_for(call: RecordedCall) -> Any:
    target = call.request.target
    try:
        devices = jax.local_devices(backend=target.backend)
    except RuntimeError:
        devices = []
    match = [device for device in devices if target.device_kind in ("", device.device_kind)]
    if not match:
        remedy = "tune on a machine that has one, and bring the result here with save and load"
        raise invalid("target", str(target), f"a device of this process: {jax.local_devices()[0].device_kind}", remedy=remedy)
    return match[0]


def _trials(problem: TuningProblem, retry: bool) -> list[_Trial]:
    trials: list[_Trial] = []
    for candidate in problem.candidates():
        question = Question(problem.request, problem.phase, candidate)
        configs = dict.fromkeys([None] if question.space is None else (question.heuristic, *question.legal))
        quarantine = QuarantineFilter(problem.request, problem.phase, candidate, _key(problem, candidate))
        for config in configs:
            reason = quarantine.reason(config, found_here=not retry)
            failure = "" if reason is None else f"quarantined: {reason}"
            trials.append(_Trial(candidate, config, failure=failure, was_quarantined=quarantine.is_own(config)))
    return trials


def _key(problem: TuningProblem, candidate: Candidate) -> Key:
    return Key.of(problem.request, problem.phase, candidate)


def _verify(problem: TuningProblem, trial: _Trial) -> None:
    if trial.failure:
        return
    try:
        results = jax.block_until_ready(trial.program(*problem.first))
    except Exception as error:  # noqa: BLE001 - a kernel that fails on the device is this config's failure
        trial.fail(error)
        return
    trial.check = problem.check(results)
    if not trial.check.passed:
        trial.failure = f"wrong numbers: error {trial.check.error:.3g} of what is tolerated, against {trial.check.reference}"
        trial.lasting = True


def _quarantine(problem: TuningProblem, trials: list[_Trial]) -> None:
    """Keep what failed from being chosen. Where nothing at all is right, no single config is to blame."""
    if all(trial.failure for trial in trials):
        return
    for trial in trials:
        if trial.was_quarantined and not trial.failure:
            lift(_key(problem, trial.candidate), trial.config)
    failed = [trial for trial in trials if trial.lasting]
    if failed:
        add(Quarantined.of(_key(problem, t.candidate), t.candidate, t.config, t.failure) for t in failed)


def _leader(trials: list[_Trial]) -> str:
    timed = [trial for trial in trials if trial.seconds]
    if not timed:
        return "nothing that is right"
    best = min(timed, key=lambda trial: trial.timing.median)
    knobs = "" if best.config is None else f" {best.config}"
    return f"{best.candidate.id}{knobs}: {1e3 * best.timing.median:.3g} ms"


def _entries(
    problem: TuningProblem, groups: Mapping[Candidate, list[_Trial]], winners: Mapping[Candidate, _Trial | None]
) -> tuple[Entry, ...]:
    """One entry per implementation with a config that is right; each names the fastest of all."""
    right = {candidate: winner for candidate, winner in winners.items() if winner is not None}
    for candidate, group in groups.items():
        if candidate not in right:
            message = f"autotune: no config of {candidate.id} is right for {problem}: {group[0].failure}"
            warn(message, EjkernelWarning)
    if not right:
        return ()
    fastest = min(right, key=lambda candidate: right[candidate].timing.median)
    return tuple(
        Entry(
            key=_key(problem, candidate),
            config=to_plain(winner.config),
            best=fastest.id if len(groups) > 1 else "",
            timings=tuple(trial.timing for trial in groups[candidate]),
            check=winner.check,
            provenance=_provenance(candidate, problem.device),
        )
        for candidate, winner in right.items()
    )


def _provenance(candidate: Candidate, device: Any) -> dict[str, str]:
    import importlib_metadata

    facts = {
        "device": device.device_kind,
        "driver": str(getattr(device.client, "platform_version", "")).splitlines()[0] if device.platform != "cpu" else "",
        "jax": jax.__version__,
        "jaxlib": importlib_metadata.version("jaxlib"),
        candidate.distribution or candidate.platform: candidate.version,
        "machine": platform.machine(),
        "cores": str(os.cpu_count()),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return {name: value for name, value in facts.items() if value}
