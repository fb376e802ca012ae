"""One problem and phase of `orders.py`: a program of each implementation, what they compute, and how long they take."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from order_grid import Problem

import ejkernel
from ejkernel.errors import in_one_line
from ejkernel_bench._clock import DeviceClock, _busy, _events
from ejkernel_bench._program import Program as Timed

NAMES = "milliseconds: of kernels, by implementation; with_host: of a call that is repeated, with gaps and the host's time"
LOSSES = ("fused_cross_entropy", "fused_kl_divergence")
"""Differentiated in their first result alone."""
FEWEST, MOST, SPENT = 3, 10, 0.2
"""Runs of each program, within so many seconds of all of them if there is a choice."""
REPEATED = 100
NOT_FINITE = 1e9
"""Deviation of results that are not finite where those of the chosen one are."""
Call = tuple[Callable[..., Any], tuple[Any, ...]]


class Program:
    """One implementation. `jitted`: what is called one after the other; the first takes the problem's arrays."""

    def __init__(self, problem: Problem, phase: str, name: str) -> None:
        self.problem, self.phase, self.error = problem, phase, "it was not compiled in time"
        self.function = functools.partial(getattr(ejkernel, problem.function), **problem.options, platform=name)
        self.jitted: list[Any] = []

    def _traced(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """Functions with shapes of their arguments."""
        arrays = self.problem.arrays
        if self.phase == "forward":
            return [(jax.jit(lambda arrays: self.function(**arrays)), (arrays,))]
        moving = self.problem.differentiated

        def trained(arrays: dict[str, Any]) -> Any:
            fixed = {name: one for name, one in arrays.items() if name not in moving}
            out, pull = jax.vjp(
                lambda given: floats(self.problem.function, self.function(**fixed, **given)),
                {name: arrays[name] for name in moving},
            )
            return out, pull

        out, pull = jax.eval_shape(trained, arrays)
        leaves, tree = jax.tree.flatten(pull)

        def forward(arrays: dict[str, Any]) -> Any:
            out, pull = trained(arrays)
            return out, jax.tree.leaves(pull)

        def backward(leaves: list[Any], cotangents: list[Any]) -> Any:
            return tree.unflatten(leaves)(cotangents)[0]

        return [(jax.jit(forward), (arrays,)), (jax.jit(backward), (leaves, out))]

    def compile(self) -> None:
        try:
            found = self._traced()
            for jitted, shapes in found:
                jitted.lower(*shapes).compile()
            self.jitted = [jitted for jitted, _ in found]
        except Exception as error:  # noqa: BLE001 - what does not compile is a finding
            self.error = f"{type(error).__name__}: {in_one_line(error)[:300]}"

    def lowered(self) -> str | None:
        """Why it cannot be lowered for a GPU."""
        try:
            for jitted, shapes in self._traced():
                jitted.trace(*shapes).lower(lowering_platforms=("cuda",))
        except Exception as error:  # noqa: BLE001 - reported
            return f"{type(error).__name__}: {in_one_line(error)[:300]}"
        return None


def floats(function: str, found: Any) -> list[Any]:
    """What is differentiated of a result."""
    leaves = [leaf for leaf in jax.tree.leaves(found) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return leaves[:1] if function in LOSSES else leaves


class _Draws:
    """The problem's arrays and cotangents, and how results are compared: compiled beside the programs."""

    def __init__(self, problem: Problem, phase: str) -> None:
        self.problem, self.phase = problem, phase
        self.arrays, self.cotangents = jax.jit(problem.make), jax.jit(self._cotangents)
        self.error = ""

    def _cotangents(self) -> list[Any]:
        """Ones of a loss."""
        shapes = floats(self.problem.function, self._results())
        keys = jax.random.split(jax.random.key(1), len(shapes))
        return [
            jax.random.normal(key, one.shape, jnp.float32).astype(one.dtype) if one.shape else jnp.ones((), one.dtype)
            for key, one in zip(keys, shapes, strict=True)
        ]

    def _results(self) -> Any:
        """Of the forward phase, as shapes."""
        function = functools.partial(getattr(ejkernel, self.problem.function), **self.problem.options)
        return jax.eval_shape(lambda arrays: function(**arrays), self.problem.arrays)

    def compile(self) -> None:
        try:
            self.arrays.lower().compile()
            results = self._results()
            if self.phase != "forward":
                self.cotangents.lower().compile()
                results = {name: self.problem.arrays[name] for name in self.problem.differentiated}
            leaves = jax.tree.leaves(results)
            _difference.lower(leaves, leaves).compile()
        except Exception as error:  # noqa: BLE001 - raised again where it is run
            self.error = in_one_line(error)

    def lowered(self) -> str | None:
        return None


class Trial:
    """A problem in a phase, and the implementations that take it, the chosen one first.

    Attributes:
        programs: to be compiled, with the draws of arrays.
        calls: after `run`, of each implementation that ran.
    """

    def __init__(self, problem: Problem, phase: str) -> None:
        self.problem, self.phase = problem, phase
        self.operation, self.chosen, self.refusal, self.names = "", "", "", []
        try:
            decided = problem.decision(phase).to_dict()
            usable = [row["implementation"] for row in decided["candidates"] if row["verdict"] in ("chosen", "available")]
            self.operation, self.chosen = decided["operation"], decided["chosen"]
            self.names = [name for name in usable if name == self.chosen or name not in problem.without]
            self.names.sort(key=lambda name: name != self.chosen)
        except Exception as error:  # noqa: BLE001 - the other problems are measured all the same
            self.refusal = f"{type(error).__name__}: {in_one_line(error)[:300]}"
        self.programs: dict[str, Any] = {name: Program(problem, phase, name) for name in self.names}
        self._draws = _Draws(problem, phase)
        if self.names:
            self.programs["arrays"] = self._draws
        self.calls: dict[str, list[Call]] = {}

    def run(self) -> tuple[dict[str, float], dict[str, str]]:
        """Deviations from the chosen one's results, and why others have none."""
        deviations: dict[str, float] = {}
        failed: dict[str, str] = {}
        wanted = None
        try:
            arrays = self._draws.arrays()
            cotangents = None if self.phase == "forward" else self._draws.cotangents()
        except Exception as error:  # noqa: BLE001 - too large for this device
            return {}, {"arrays": f"{type(error).__name__}: {in_one_line(error)[:300]}"}
        for name in self.names:
            program = self.programs[name]
            try:
                if not program.jitted:
                    raise RuntimeError(program.error)
                calls, got = _called(program.jitted, arrays, cotangents)
                got = jax.block_until_ready(got)
                wanted = got if wanted is None else wanted
                error = float(_difference(jax.tree.leaves(got), jax.tree.leaves(wanted)))
                deviations[name] = float(f"{error:.1e}") if math.isfinite(error) else NOT_FINITE
                self.calls[name] = calls[-1:] if self.phase == "backward" else calls
            except Exception as error:  # noqa: BLE001 - the others are measured all the same
                failed[name] = f"{type(error).__name__}: {in_one_line(error)[:300]}"
        return deviations, failed

    def forget(self) -> None:
        self.calls.clear()
        self.programs.clear()


def _called(jitted: list[Any], arrays: Any, cotangents: Any) -> tuple[list[Call], Any]:
    """What was called with what, and the last result."""
    if len(jitted) == 1:
        return [(jitted[0], (arrays,))], jitted[0](arrays)
    _, leaves = jitted[0](arrays)
    return [(jitted[0], (arrays,)), (jitted[1], (leaves, cotangents))], jitted[1](leaves, cotangents)


@jax.jit
def _difference(got: list[Any], wanted: list[Any]) -> Any:
    """The largest: in norm, relative, and of integers the share that differs."""

    def one(a: Any, b: Any) -> Any:
        if not jnp.issubdtype(b.dtype, jnp.floating):
            return jnp.mean((a != b).astype(jnp.float32))
        a, b = (x.astype(jnp.float32) for x in (a, b))
        off = jnp.where((a == b) | (jnp.isnan(a) & jnp.isnan(b)), 0.0, a - b)
        return jnp.linalg.norm(off.ravel()) / jnp.maximum(jnp.linalg.norm(jnp.where(jnp.isfinite(b), b, 0.0).ravel()), 1e-30)

    return jnp.max(jnp.stack([one(a, b) for a, b in zip(got, wanted, strict=True)]))


@jax.jit
def _mark(x: Any) -> Any:
    """A kernel of a name that no other has, between two calls."""
    return jax.lax.cbrt(x)


@functools.cache
def _marker() -> str:
    """The name of its kernel."""
    x = jnp.ones(1)
    found = {event.name for event in _traced(lambda: _mark(x).block_until_ready())}
    if len(found) != 1:
        raise RuntimeError(f"the marker has {len(found)} kernels")
    return found.pop()


def milliseconds_of(calls: Mapping[str, list[Call]]) -> dict[str, float]:
    """Medians of the kernels' time, of some runs by turns; kernels that overlap count once."""
    if not calls:
        return {}
    begin = time.perf_counter()
    for name in calls:
        _run(calls[name])
    spent = time.perf_counter() - begin
    runs = int(min(max(SPENT / max(spent, 1e-6), FEWEST), MOST))
    if jax.default_backend() != "gpu":
        return {name: 1e3 * statistics.median(_waited(one) for _ in range(FEWEST)) for name, one in calls.items()}
    try:
        found = _by_turns(calls, runs)
    except Exception as error:  # noqa: BLE001 - one by one instead
        print(f"  by turns: {in_one_line(error)[:200]}", flush=True)
        found = {name: _alone(one, runs) for name, one in calls.items()}
    return {name: round(statistics.median(taken), 6) for name, taken in found.items() if taken}


def _run(calls: list[Call]) -> None:
    jax.block_until_ready([function(*arguments) for function, arguments in calls])


def _waited(calls: list[Call]) -> float:
    begin = time.perf_counter()
    _run(calls)
    return time.perf_counter() - begin


def _by_turns(calls: Mapping[str, list[Call]], runs: int) -> dict[str, list[float]]:
    """In one trace; the marker's kernels tell where one call ends."""
    x = jnp.ones(1)
    order = [name for _ in range(runs) for name in calls]

    def run() -> None:
        for _ in range(runs):
            found = []
            for name in calls:
                found += [_mark(x), *(function(*arguments) for function, arguments in calls[name])]
            jax.block_until_ready(found)

    mark = _marker()
    segments: list[list[Any]] = []
    for event in _traced(run):
        if event.name == mark:
            segments.append([])
        elif segments:
            segments[-1].append(event)
    if len(segments) != len(order):
        raise RuntimeError(f"{len(segments)} marks for {len(order)} runs")
    found: dict[str, list[float]] = {name: [] for name in calls}
    kernels: dict[str, int] = {}
    for name, segment, taken in zip(order, segments, _busy(segments), strict=True):
        if not segment or kernels.setdefault(name, len(segment)) != len(segment):
            raise RuntimeError(f"runs of {name} were not alike")
        found[name].append(1e-6 * taken)
    return found


def _traced(run: Callable[[], None]) -> list[Any]:
    """The kernels, in order of their beginning."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            run()
        finally:
            jax.profiler.stop_trace()
        return sorted(event for path in pathlib.Path(folder).rglob("*.xplane.pb") for event in _events(path))


def _alone(calls: list[Call], runs: int) -> list[float]:
    clock = DeviceClock("gpu")
    found = [clock.samples(Timed(function, [arguments] * runs, lambda out: {"out": out}), 0) for function, arguments in calls]
    return [1e3 * sum(parts) for parts in zip(*found, strict=True)] if all(found) else []


def with_host(call: Call) -> float:
    """Milliseconds of one of many calls that nothing waits for but the last."""
    function, arguments = call
    taken = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(REPEATED):
            found = function(*arguments)
        jax.block_until_ready(found)
        taken.append(time.perf_counter() - begin)
    return round(1e3 * statistics.median(taken) / REPEATED, 6)
