"""Adam on the demo's model, one compiled step, with compilation and steps timed apart."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ejkernel_demo import data
from ejkernel_demo.model import Parameters, Primitives, Shape, initialise, loss

_STAMP = re.compile(r"ejkernel\.(\w+)(?:\.(backward))?\[([\w.\-]+)\]")


@dataclasses.dataclass(frozen=True)
class Settings:
    """One training run; the same settings give the same numbers on the same machine."""

    steps: int = 320
    seed: int = 0
    batch: int = 4
    learning_rate: float = 3e-3
    warmup: int = 20
    shape: Shape = dataclasses.field(default_factory=Shape)

    def windows(self) -> np.ndarray:
        return data.batches(data.load_text(), seed=self.seed, steps=self.steps, batch=self.batch, length=self.shape.length)


class Trainer:
    """A compiled training step and its state.

    Attributes:
        compile_seconds: tracing, lowering and compiling the step.
        stamps: `(operation, phase, implementation)` of every ejkernel call found in the compiled program.
        losses: nats per byte, one per step taken.
        seconds: wall time of each of those steps.
    """

    def __init__(self, settings: Settings, primitives: Primitives) -> None:
        self.settings = settings
        self.primitives = primitives
        self.losses: list[float] = []
        self.seconds: list[float] = []
        parameters = initialise(settings.shape, settings.seed)
        optimizer = _adam(settings)
        self._state = (parameters, optimizer.init(parameters))
        window = jax.ShapeDtypeStruct((settings.batch, settings.shape.length + 1), jnp.int32)
        start = time.perf_counter()
        step = jax.jit(_step(settings, primitives, optimizer), donate_argnums=0)
        # float32 products everywhere, so that accelerators do not compare TF32 with float32
        with jax.default_matmul_precision("float32"):
            self._compiled = step.lower(self._state, window).compile()
        self.compile_seconds = time.perf_counter() - start
        found = _STAMP.findall(self._compiled.as_text() or "")
        self.stamps = sorted({(operation, phase or "forward", name) for operation, phase, name in found})

    @property
    def parameters(self) -> Parameters:
        return self._state[0]

    def advance(self, window: np.ndarray) -> tuple[float, float]:
        """One step; returns its loss and its wall time in seconds."""
        start = time.perf_counter()
        self._state, value = self._compiled(self._state, window)
        value = float(value)
        return value, time.perf_counter() - start

    def run(self, windows: np.ndarray, on_step: Callable[[int, float], None]) -> None:
        """Train over all windows, calling `on_step(step, loss)` after each."""
        for number, window in enumerate(windows, 1):
            value, seconds = self.advance(window)
            self.losses.append(value)
            self.seconds.append(seconds)
            on_step(number, value)


def _adam(settings: Settings) -> optax.GradientTransformation:
    """Adam whose rate rises over the first steps, and falls along a cosine to a tenth at the last."""
    rise = optax.linear_schedule(1 / settings.warmup, 1, settings.warmup - 1)
    fall = optax.cosine_decay_schedule(settings.learning_rate, settings.steps, alpha=0.1)
    return optax.adam(lambda count: rise(count) * fall(count), b2=0.99)


def _step(settings: Settings, primitives: Primitives, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    def step(state: Any, window: jax.Array) -> tuple[Any, jax.Array]:
        parameters, moments = state
        value, gradients = jax.value_and_grad(loss)(parameters, window, settings.shape, primitives)
        updates, moments = optimizer.update(gradients, moments)
        return (optax.apply_updates(parameters, updates), moments), value

    return step


def interleaved_seconds(trainers: Sequence[Trainer], window: np.ndarray, rounds: int = 12) -> list[list[float]]:
    """Step times of trainers taken in turns, so that a change of the machine's load meets all alike.

    The steps are real and move the parameters; call it after everything else that reads them.
    """
    times: list[list[float]] = [[] for _ in trainers]
    for _ in range(rounds):
        for collected, trainer in zip(times, trainers, strict=True):
            collected.append(trainer.advance(window)[1])
    return times
