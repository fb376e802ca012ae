"""Compares builds of one model, in three parts:

1. each learns by itself from the same start on the same batches, so that only one holds memory;
2. losses and first gradients are held against those of the first build;
3. steps are timed in turns on one state, which all builds advance, in an order that changes from round to round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_train import data, report
from ejkernel_train.config import TrainConfig
from ejkernel_train.step import State, initialise, lower_step

LOSS = {"float32": 0.001, "bfloat16": 0.02, "float8": 0.05}
"""Nats between the losses of two builds in the first two steps."""

GRADIENT = {"float32": 0.01, "bfloat16": 0.1, "float8": 0.25}
"""How far two builds' gradients may be apart, the norm of their difference over the norm of one: rounding, and in a mixture the
tokens that it sends to another expert."""

MAGNIFIED = 3
"""The delta rule magnifies rounding: keys of length 1 may be nearly orthogonal to a query."""


def compare(
    configs: Sequence[TrainConfig],
    tokens: data.Source,
    *,
    peak: float | None,
    skip: int,
    rounds: int,
    progress: Callable[[int, Sequence[float]], None],
) -> dict[str, Any]:
    """The record of `report.run` for several configs. A build that fails is named in it with its error; the others go on.

    Raises:
        ValueError: configs that differ in more than their kernels.
        RuntimeError: no build ran.
    """
    first = configs[0]
    for config in configs[1:]:
        if dataclasses.replace(config, kernels=first.kernels, plain=first.plain) != first:
            raise ValueError("builds that are compared may differ in their kernels alone")
    builds, failed = compiled(configs)
    shardings = builds[0].shardings if builds else None
    reference: Any = None
    learnt: list[report.Build] = []
    distances: list[float] = []
    for build in builds:
        try:
            gradients = learn(build, initialise(first, shardings), tokens, progress)
            reference = gradients if reference is None else reference
            distances.append(float(apart(gradients, reference)))
            learnt.append(build)
        except RuntimeError as error:  # memory that a build lacks is a result
            failed.append(failure(build.config, error))
        gradients = None
    reference = None
    if not learnt:
        raise RuntimeError(f"no build ran: {failed}")
    agreements = [agreement(build, learnt[0], distance) for build, distance in zip(learnt, distances, strict=True)]
    seconds, state = timed(learnt, initialise(first, shardings), tokens, rounds)
    found = report.records(learnt, state, peak, [each[min(skip, rounds - 1) :] for each in seconds])
    return {
        **report.summary(first, state, peak),
        "protocol": f"{first.steps} steps of each build alone, then {rounds} of each in turns on one state in changing order, "
        f"the first {min(skip, rounds - 1)} not counted; wall time of each until its results are there, medians",
        "builds": [{**record, "agreement": one} for record, one in zip(found, agreements, strict=True)],
        "failed": failed,
    }


def compiled(configs: Sequence[TrainConfig]) -> tuple[list[report.Build], list[dict[str, Any]]]:
    """The builds, and those that do not compile. A thread compiles one while the next is traced."""
    builds: list[report.Build] = []
    failed: list[dict[str, Any]] = []
    with ThreadPoolExecutor(1) as thread:
        begun: list[tuple[TrainConfig, Any]] = []
        for config in configs:
            try:
                begun.append((config, thread.submit(lower_step(config).compile)))
            except (RuntimeError, NotImplementedError) as error:  # what a kernel of others cannot do is a result
                failed.append(failure(config, error))
        for config, future in begun:
            try:
                builds.append(report.Build(config, future.result(), start=False))
            except RuntimeError as error:
                failed.append(failure(config, error))
    return builds, failed


def failure(config: TrainConfig, error: Exception) -> dict[str, Any]:
    return {"kernels": config.kernels, "plain": list(config.plain), "error": f"{type(error).__name__}: {error}"[:500]}


def learn(build: report.Build, state: State, tokens: data.Source, progress: Callable[..., None]) -> Any:
    """All steps of a build by itself. Returns its first gradients, up to a factor that all builds share."""
    config = build.config
    gradients: Any = None
    for step in range(config.steps):
        state, measured = build.step(state, data.batch(tokens, config.seed, step, config.batch, config.length))
        build.losses.append(measured.loss)
        if step == 0:
            gradients = jax.tree.map(jnp.copy, state.moments[1][0].mu)
        progress(step + 1, [measured.loss])
    return gradients


@jax.jit
def apart(moments: Any, reference: Any) -> jax.Array:
    """The norm of the difference over that of the reference."""

    def norm(tree: Any) -> jax.Array:
        return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))

    return norm(jax.tree.map(jnp.subtract, moments, reference)) / norm(reference)


def agreement(build: report.Build, first: report.Build, distance: float) -> dict[str, Any]:
    """How far losses and gradients are from the first build's, and whether that is rounding."""
    config = build.config
    loss = max(abs(a - b) for a, b in zip(build.losses[:2], first.losses[:2], strict=True))
    dtype = "float8" if config.float8 else config.dtype
    most = GRADIENT[dtype] * (MAGNIFIED if "delta_rule" in config.sizes.pattern else 1)
    agrees = loss <= LOSS[dtype] and distance <= most
    return {"with": first.config.kernels, "loss": loss, "gradient": distance, "most": most, "agrees": agrees}


def timed(builds: Sequence[report.Build], state: State, tokens: data.Source, rounds: int) -> tuple[list[list[float]], State]:
    """Seconds of each build's steps, in turns."""
    config, number = builds[0].config, len(builds)
    seconds: list[list[float]] = [[] for _ in builds]
    for step in range(rounds):
        window = data.batch(tokens, config.seed, config.steps + step, config.batch, config.length)
        turn = [(step + index) % number for index in range(number)]
        for index in turn[:: -1 if step // number % 2 else 1]:  # so that none always follows the same other
            state, measured = builds[index].step(state, window)
            seconds[index].append(measured.seconds)
    return seconds, state
