"""Runs one build, or two in turns on the same batches, and reports what each cost and learnt."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import platform
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ejkernel_train import cost, data, finite
from ejkernel_train.checkpoint import Checkpoints
from ejkernel_train.config import TrainConfig
from ejkernel_train.step import State, compile_step, initialise

PACKAGES = (
    "ejkernel-core",
    "ejkernel-xla",
    "ejkernel-triton",
    "ejkernel-pallas",
    "ejkernel-cuda",
    "equinox",
    "jax",
    "jaxlib",
    "optax",
)
_COLLECTIVE = re.compile(r" = (.*) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_STAMP = re.compile(r"ejkernel\.(\w+)(?:\.(backward))?\[([\w.\-]+)\]")


class Build:
    """A compiled step with its state, its losses and its times.

    Attributes:
        losses: nats per token, one for each step.
        norms: of the gradient before clipping, one for each step.
        seconds: wall time of each step, until its results are there.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.compiled = compile_step(config)
        shardings, self._batch = self.compiled.shardings
        self.state: State = jax.jit(lambda: initialise(config), out_shardings=shardings)()
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.seconds: list[float] = []

    @property
    def devices(self) -> int:
        return len(self.state.step.sharding.device_set)

    def advance(self, window: np.ndarray) -> None:
        """One step on windows `[B, T + 1]` of the whole batch, of which every process gives its devices their part."""
        placed: Any = window
        if self._batch is not None:
            placed = jax.make_array_from_callback(window.shape, self._batch, lambda part: window[part])
        start = time.perf_counter()
        self.state, measures = jax.block_until_ready(self.compiled.program(self.state, placed))
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(measures.loss))
        self.norms.append(float(measures.norm))

    def record(self, peak: float | None, skip: int) -> dict[str, Any]:
        """What this build cost and learnt; times of the first `skip` steps do not count."""
        config, compiled = self.config, self.compiled
        seconds = statistics.median(self.seconds[skip:])
        operations = cost.step_operations(config, self.state.model)
        rate = peak * self.devices if peak else None
        return {
            "kernels": config.kernels,
            "plain": list(config.plain),
            "trace_seconds": compiled.trace_seconds,
            "lower_seconds": compiled.lower_seconds,
            "compile_seconds": compiled.compile_seconds,
            "step_seconds": seconds,
            "step_seconds_quartiles": np.quantile(self.seconds[skip:], [0.25, 0.75]).tolist(),
            "tokens_per_second": config.batch * config.length / seconds,
            "operations_per_step": operations,
            "share_of_peak": operations / seconds / rate if rate else None,
            "program_bytes": program_bytes(compiled.program),
            "implementations": implementations(compiled.program),
            "collectives": dict(Counter(found.kind for found in collectives(compiled.program))),
            "losses": [loss if math.isfinite(loss) else None for loss in self.losses],  # JSON has no NaN
        }


def run(
    configs: Sequence[TrainConfig],
    tokens: np.ndarray,
    *,
    peak: float | None = None,
    skip: int = 3,
    progress: Callable[[int, Sequence[float]], None] = lambda step, losses: None,
    checkpoints: Checkpoints | None = None,
    save_every: int = 100,
) -> dict[str, Any]:
    """Train all configs on the same batches, a step of each in turns, and return one record.

    Args:
        configs: they may differ in everything but seed, steps, batch and length.
        tokens: the text, of `data.load`.
        peak: operations per second of one device, which the share is of; None for the device's, where it is known.
        skip: how many steps come before those that are timed.
        progress: called after each step with its number and the losses.
        checkpoints: where a single config goes on from, and where it is saved.
        save_every: steps between checkpoints; the last step is saved too.

    Raises:
        ValueError: several configs with checkpoints; a checkpoint of all steps.
        NotFiniteError: the loss or the gradient of a step is not finite, see `TrainConfig.on_nonfinite`.
    """
    if checkpoints and len(configs) > 1:
        raise ValueError("checkpoints are of one build; leave out either --checkpoints or --compare")
    peak = peak or cost.peak_rate()
    builds = [Build(config) for config in configs]
    first = configs[0]
    if checkpoints:
        builds[0].state = checkpoints.restore(builds[0].state)
    start = int(builds[0].state.step)
    if start >= first.steps:
        raise ValueError(f"the checkpoint has {start} steps already; ask for more with --steps, or for another folder")
    for step in range(start, first.steps):
        window = data.batch(tokens, first.seed, step, first.batch, first.length)
        for build in builds[:: -1 if step % 2 else 1]:  # the order changes, so that none always follows the other
            build.advance(window)
            finite.check(build.config, step + 1, build.losses, build.norms, checkpoints)
        if checkpoints and ((step + 1) % save_every == 0 or step + 1 == first.steps):
            finite.check_state(builds[0].state, step + 1, checkpoints)
            checkpoints.save(step + 1, builds[0].state)
        progress(step + 1, [build.losses[-1] for build in builds])
    device = jax.local_devices()[0]
    return {
        "config": dataclasses.asdict(first),
        "sizes": dataclasses.asdict(first.sizes),
        "parameters": cost.parameters(builds[0].state.model),
        "device": device.device_kind,
        "devices": builds[0].devices,
        "first_step": start + 1,
        "peak_operations_per_second": peak,  # of one device
        "process_peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "versions": versions(),
        "builds": [build.record(peak, min(skip, first.steps - start - 1)) for build in builds],
    }


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
