"""Runs a build and reports what it cost and learnt."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import math
import os
import platform
import re
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ejkernel_train import cost, data, finite
from ejkernel_train.checkpoint import Checkpoints
from ejkernel_train.config import TrainConfig
from ejkernel_train.evaluate import Evaluated, Evaluation, as_record
from ejkernel_train.model import Model, restacked
from ejkernel_train.resume import resume
from ejkernel_train.sharding import placed
from ejkernel_train.step import Compiled, State, compile_step, initialise

PACKAGES = (
    "ejkernel-core",
    "ejkernel-xla",
    "ejkernel-triton",
    "ejkernel-pallas",
    "ejkernel-cuda",
    "equinox",
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-linear-attention",
    "jax-triton",
    "nvidia-cudnn-cu13",
    "optax",
    "triton",
)
_COLLECTIVE = re.compile(r" = (.*) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CUSTOM_CALL = re.compile(r'custom_call_target="([^"]+)"')
_STAMP = re.compile(r"ejkernel\.(\w+)(?:\.(backward))?\[([\w.\-]+)\]")


class Measured(NamedTuple):
    """Of one step: the loss before its update, the norm of its gradient, and its seconds until they are there."""

    loss: float
    norm: float
    seconds: float


class Build:
    """A compiled step with its state, its losses and its times.

    Attributes:
        losses: nats per token, one for each step.
        norms: of the gradient before clipping, one for each step.
        seconds: wall time of each step, until its results are there.
    """

    def __init__(self, config: TrainConfig, compiled: Compiled | None = None, *, start: bool = True) -> None:
        self.config = config
        self.compiled = compiled or compile_step(config)
        self.shardings, self._batch = self.compiled.shardings
        if start:
            self.state = initialise(config, self.shardings)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.seconds: list[float] = []

    def advance(self, window: data.Source) -> None:
        """One step of its own state."""
        self.state, measured = self.step(self.state, window)
        self.losses.append(measured.loss)
        self.norms.append(measured.norm)
        self.seconds.append(measured.seconds)

    def step(self, state: State, window: data.Source) -> tuple[State, Measured]:
        """The next state, and what is measured of a step on the whole batch. The state's memory is used again."""
        window = placed(window, self._batch)
        start = time.perf_counter()
        state, measures = jax.block_until_ready(self.compiled.program(state, window))
        seconds = time.perf_counter() - start
        return state, Measured(float(measures.loss), float(measures.norm), seconds)

    def record(self, peak: float | None, operations: float, seconds: Sequence[float]) -> dict[str, Any]:
        """What this build cost and learnt, with the times that count; `peak` of all devices."""
        config, compiled = self.config, self.compiled
        median = statistics.median(seconds)
        return {
            "kernels": config.kernels,
            "plain": list(config.plain),
            "trace_seconds": compiled.trace_seconds,
            "lower_seconds": compiled.lower_seconds,
            "compile_seconds": compiled.compile_seconds,
            "step_seconds": median,
            "step_seconds_quartiles": np.quantile(seconds, [0.25, 0.75]).tolist(),
            "steps_seconds": [round(each, 6) for each in seconds],
            "tokens_per_second": config.batch * config.length / median,
            "operations_per_step": operations,
            "share_of_peak": operations / median / peak if peak else None,
            "program_bytes": program_bytes(compiled.program),
            "implementations": implementations(compiled.program),
            "custom_calls": custom_calls(compiled.program),
            "collectives": dict(Counter(found.kind for found in collectives(compiled.program))),
            "losses": [loss if math.isfinite(loss) else None for loss in self.losses],  # JSON has no NaN
        }


def run(
    configs: Sequence[TrainConfig],
    tokens: data.Source,
    *,
    peak: float | None = None,
    skip: int = 3,
    rounds: int | None = None,
    progress: Callable[[int, Sequence[float]], None] = lambda step, losses: None,
    checkpoints: Checkpoints | None = None,
    save_every: int = 100,
    held_out: data.Source | None = None,
    evaluate_every: int | None = None,
    evaluated: Callable[[Evaluated], None] = lambda found: None,
    model: Model | None = None,
) -> dict[str, Any]:
    """Train one config, or compare several (see `comparison.py`), and return one record.

    Args:
        configs: several may differ in `kernels` and `plain`.
        tokens: the text, of `data.load`, or documents, of `data.pack`.
        peak: operations per second of one device, which the share is of; None for the device's, where it is known.
        skip: how many steps come before those that are timed.
        rounds: how many steps of each of several are timed, in turns; None for as many as it learns.
        progress: called after each step with its number and the loss.
        checkpoints: where a single config goes on from, and where it is saved.
        save_every: steps between checkpoints; the last step is saved too.
        held_out: what a single config is evaluated on, after its last step and every `evaluate_every` steps.
        evaluated: called with what was found.
        model: what a single config begins with, its blocks stacked; None for random weights.

    Raises:
        ValueError: several configs with checkpoints, or that differ in more; a checkpoint of all steps.
        NotFiniteError: the loss or the gradient of a step is not finite, see `TrainConfig.on_nonfinite`.
    """
    first, peak = configs[0], peak or cost.peak_rate()
    if len(configs) > 1:
        if checkpoints:
            raise ValueError("checkpoints are of one build; leave out either --checkpoints or --compare")
        if held_out is not None:
            raise ValueError("one build is evaluated; leave out either --held-out or --compare")
        from ejkernel_train import comparison

        return comparison.compare(configs, tokens, peak=peak, skip=skip, rounds=rounds or first.steps, progress=progress)
    build = Build(first)
    if model is not None:
        where = jax.tree.map(lambda leaf: leaf.sharding, build.state.model)
        build.state = build.state._replace(model=jax.device_put(restacked(model, first.layers == "scan"), where))
    if checkpoints:
        build.state = resume(first, build.state, checkpoints)
    start = int(build.state.step)
    if start >= first.steps:
        raise ValueError(f"the checkpoint has {start} steps already; ask for more with --steps, or for another folder")
    evaluate = None if held_out is None else Evaluation(first, held_out)
    evaluations: list[Evaluated] = []
    for step in range(start, first.steps):
        build.advance(data.batch(tokens, first.seed, step, first.batch, first.length))
        finite.check(first, step + 1, build.losses, build.norms, checkpoints)
        if checkpoints and ((step + 1) % save_every == 0 or step + 1 == first.steps):
            finite.check_state(build.state, step + 1, checkpoints)
            checkpoints.save(step + 1, build.state)
        progress(step + 1, build.losses[-1:])
        if evaluate and (step + 1 == first.steps or (evaluate_every and (step + 1) % evaluate_every == 0)):
            evaluations.append(evaluate(build.state.model, step + 1))
            evaluated(evaluations[-1])
    seconds = build.seconds[min(skip, first.steps - start - 1) :]
    return {
        **summary(first, build.state, peak),
        "first_step": start + 1,
        "evaluations": [as_record(each) for each in evaluations],
        "builds": records([build], build.state, peak, [seconds]),
    }


def records(
    builds: Sequence[Build], state: State, peak: float | None, seconds: Sequence[Sequence[float]]
) -> list[dict[str, Any]]:
    """Of builds of one model, with the times of each that count."""
    operations = cost.step_operations(builds[0].config, state.model)
    rate = peak * devices(state) if peak else None
    return [build.record(rate, operations, times) for build, times in zip(builds, seconds, strict=True)]


def summary(config: TrainConfig, state: State, peak: float | None) -> dict[str, Any]:
    """What ran, and on what."""
    device = jax.local_devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": dataclasses.asdict(config),
        "sizes": dataclasses.asdict(config.sizes),
        "parameters": cost.parameters(state.model),
        "device": device.device_kind,
        "devices": devices(state),
        "driver": driver(),
        "peak_operations_per_second": peak,  # of one device
        "process_peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "versions": versions(),
        "xla_flags": os.environ.get("XLA_FLAGS"),
    }


def devices(state: State) -> int:
    return len(state.step.sharding.device_set)


def driver() -> str | None:
    """The version of NVIDIA's driver, None where there is none."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return None


def program_bytes(program: jax.stages.Compiled) -> int | None:
    """Device memory that the program holds at its peak: arguments, results that are no arguments' buffers, temporaries."""
    found = program.memory_analysis()
    if found is None:
        return None
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + results + found.temp_size_in_bytes


def implementations(program: jax.stages.Compiled) -> list[str]:
    """Which code ran each call of ejkernel, from the names in the program: `flash_attention forward triton`."""
    found = _STAMP.findall(program.as_text() or "")
    return sorted({f"{operation} {phase or 'forward'} {name}" for operation, phase, name in found})


def custom_calls(program: jax.stages.Compiled) -> dict[str, int]:
    """How many of each target are in the program's text, where the body of a loop stands once: cuBLAS, cuDNN, kernels."""
    return dict(Counter(_CUSTOM_CALL.findall(program.as_text() or "")).most_common())


class Collective(NamedTuple):
    """One instruction of a program: its kind ("all-gather"), and dtype and shape of its results on each device."""

    kind: str
    results: tuple[tuple[str, tuple[int, ...]], ...]


def collectives(program: jax.stages.Compiled) -> list[Collective]:
    """Those in the program's text, where the body of a loop stands once."""

    def results(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple((dtype, tuple(map(int, shape.split(",") if shape else ()))) for dtype, shape in _ARRAY.findall(text))

    return [Collective(kind, results(text)) for text, kind in _COLLECTIVE.findall(program.as_text() or "")]


def versions() -> dict[str, str]:
    """Of Python and those of `PACKAGES` that are installed."""
    installed = {name: importlib.metadata.version(name) for name in PACKAGES if _is_installed(name)}
    return {"python": platform.python_version(), **installed}


def _is_installed(name: str) -> bool:
    return any(True for _ in importlib.metadata.distributions(name=name))
