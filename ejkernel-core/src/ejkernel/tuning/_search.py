"""The tuner: every config of every implementation that may run a call, checked first, then timed against the others.

Nothing is timed while tracing, and nothing that gave wrong numbers is timed at all. Times are wall-clock medians of rounds in which
the candidates take turns, over several sets of arguments, so that a machine that slows down hurts all alike.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from ejkernel._records import Candidate
from ejkernel._timing import repeats_for, seconds
from ejkernel.errors import EjkernelWarning, in_one_line, invalid
from ejkernel.tuning._configs import config_space, to_plain
from ejkernel.tuning._entry import Check, Entry, Timing
from ejkernel.tuning._heuristic import legal_configs
from ejkernel.tuning._key import Key
from ejkernel.tuning._problems import TuningProblem
from ejkernel.tuning._progress import Progress
from ejkernel.tuning._recording import RecordedCall
from ejkernel.tuning._result import AutotuningResult

_WORTH = 0.97
"""A config replaces the heuristic's if it takes less than this share of its time: below, the difference may be noise."""


@dataclasses.dataclass
class _Trial:
    """One implementation with one config, on its way through the tuner."""

    candidate: Candidate
    config: Any
    program: Any = None
    check: Check | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)
    failure: str = ""

    @property
    def timing(self) -> Timing:
        return Timing(to_plain(self.config), tuple(self.seconds), self.failure)


@dataclasses.dataclass(frozen=True)
class Search:
    """A `Tuner` that tries the whole search space of every implementation.

    Attributes:
        rounds: timed runs of each survivor.
        input_sets: sets of random arguments that timed runs rotate over.
        keep_within: after the first round, configs slower than this many times the best are not timed further.
        workers: threads that compile; None = one per core, at most 8.
        progress: show a progress bar; None = where stderr is a terminal.
        store: write the entries of each call to the user's cache as soon as they are found.
    """

    rounds: int = 5
    input_sets: int = 2
    keep_within: float = 3.0
    workers: int | None = None
    progress: bool | None = None
    store: bool = False

    def __post_init__(self) -> None:
        for name in ("rounds", "input_sets"):
            if getattr(self, name) < 1:
                raise invalid(name, getattr(self, name), "a value >= 1")
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
        trials = _trials(problem)
        progress.begin(str(problem), len(trials))
        try:
            sets = [problem.first, *(problem.arguments(seed) for seed in range(1, self.input_sets))]
        except NotImplementedError as error:
            warnings.warn(f"autotune: {problem} left alone: {error}", EjkernelWarning, stacklevel=2)
            return ()
        self._compile(problem, trials)
        for trial in trials:
            _verify(problem, trial)
            progress.advance()
        self._time([trial for trial in trials if not trial.failure], sets, progress)
        for trial in trials:
            trial.program = None
        return _entries(problem, trials)

    def _compile(self, problem: TuningProblem, trials: list[_Trial]) -> None:
        def compile_one(trial: _Trial) -> None:
            try:
                trial.program = problem.program(trial.candidate, trial.config).lower(*problem.first).compile()
            except Exception as error:  # noqa: BLE001 - code of plugins and compilers; recorded as this config's failure
                trial.failure = in_one_line(error)

        with ThreadPoolExecutor(self.workers or min(os.cpu_count() or 1, 8)) as pool:
            list(pool.map(compile_one, trials))

    def _time(self, trials: list[_Trial], sets: list[Any], progress: Progress) -> None:
        repeats = {id(trial): repeats_for(trial.program, sets) for trial in trials}
        for turn in range(self.rounds):
            best = min((min(trial.seconds, default=float("inf")) for trial in trials), default=0.0)
            for trial in trials:
                if not turn or min(trial.seconds) <= self.keep_within * best:
                    trial.seconds.append(seconds(trial.program, sets, repeats[id(trial)], turn))
            progress.best(_leader(trials))


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


def _trials(problem: TuningProblem) -> list[_Trial]:
    trials: list[_Trial] = []
    for candidate in problem.candidates():
        space = config_space(candidate)
        if space is None:
            trials.append(_Trial(candidate, None))
            continue
        heuristic = space.heuristic(problem.request.call, problem.request.target)
        configs = dict.fromkeys((heuristic, *legal_configs(problem.request, candidate, space)))
        trials += [_Trial(candidate, config) for config in configs]
    return trials


def _verify(problem: TuningProblem, trial: _Trial) -> None:
    if trial.failure:
        return
    try:
        trial.check = problem.check(jax.block_until_ready(trial.program(*problem.first)))
    except Exception as error:  # noqa: BLE001 - a kernel that fails on the device is this config's failure
        trial.failure = in_one_line(error)
        return
    if not trial.check.passed:
        trial.failure = f"wrong numbers: error {trial.check.error:.3g} of what is tolerated, against {trial.check.reference}"


def _leader(trials: list[_Trial]) -> str:
    timed = [trial for trial in trials if trial.seconds]
    if not timed:
        return "nothing that is right"
    best = min(timed, key=lambda trial: trial.timing.median)
    knobs = "" if best.config is None else f" {best.config}"
    return f"{best.candidate.id}{knobs}: {1e3 * best.timing.median:.3g} ms"


def _entries(problem: TuningProblem, trials: list[_Trial]) -> tuple[Entry, ...]:
    """One entry per implementation with a config that is right; each names the fastest of all."""
    by_candidate: dict[Candidate, list[_Trial]] = {}
    for trial in trials:
        by_candidate.setdefault(trial.candidate, []).append(trial)
    winners = {candidate: _winner(group) for candidate, group in by_candidate.items()}
    right = {candidate: winner for candidate, winner in winners.items() if winner is not None}
    for candidate, group in by_candidate.items():
        if candidate not in right:
            message = f"autotune: no config of {candidate.id} is right for {problem}: {group[0].failure}"
            warnings.warn(message, EjkernelWarning, stacklevel=2)
    if not right:
        return ()
    fastest = min(right, key=lambda candidate: right[candidate].timing.median)
    request = problem.request.saving_residuals() if problem.phase == "backward" else problem.request
    return tuple(
        Entry(
            key=Key.of(request, problem.phase, candidate),
            config=to_plain(winner.config),
            best=fastest.id if len(by_candidate) > 1 else "",
            timings=tuple(trial.timing for trial in by_candidate[candidate]),
            check=winner.check,
            provenance=_provenance(candidate, problem.device),
        )
        for candidate, winner in right.items()
    )


def _winner(group: list[_Trial]) -> _Trial | None:
    """The fastest that is right; the heuristic's config, which comes first, if that is about as fast."""
    right = [trial for trial in group if not trial.failure]
    if not right:
        return None
    best = min(right, key=lambda trial: trial.timing.median)
    first = group[0]
    return first if not first.failure and best.timing.median > _WORTH * first.timing.median else best


def _provenance(candidate: Candidate, device: Any) -> dict[str, str]:
    import importlib.metadata

    facts = {
        "device": device.device_kind,
        "driver": str(getattr(device.client, "platform_version", "")).splitlines()[0] if device.platform != "cpu" else "",
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        candidate.distribution or candidate.platform: candidate.version,
        "machine": platform.machine(),
        "cores": str(os.cpu_count()),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return {name: value for name, value in facts.items() if value}
