"""Runs as programs: compiled, with the sets of arguments that they rotate over."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ejkernel.call import named
from ejkernel.testing.dispatch import Candidate, pinned, run_backward, run_forward
from ejkernel_bench._problem import BenchProblem

Function = Callable[[Any], Mapping[str, Any]]
"""From canonical inputs to public outputs by name; those that a peer does not compute are left out."""


@dataclasses.dataclass
class Program:
    """Something that can be timed.

    Attributes:
        run: the program; it may return before its results are there.
        sets: arguments of `run`, for each set of inputs.
        results: what `run` returned, as arrays by the name of the output or of the input that a gradient belongs to.
        wait: returns when what `run` returned is there.
        compile_s: seconds from a Python function to a program, by round.
        temporary_bytes: memory beyond arguments and results, where it is known.
    """

    run: Callable[..., Any]
    sets: Sequence[tuple[Any, ...]]
    results: Callable[[Any], dict[str, Any]]
    wait: Callable[[Any], Any] = jax.block_until_ready
    compile_s: Sequence[float] = ()
    temporary_bytes: int | None = None


def ours(problem: BenchProblem, candidate: Candidate, sets: Sequence[Any], rounds: int) -> Program:
    """One implementation, with the config that it would run with."""
    request = pinned(problem.request, problem.phase, candidate, None)
    if problem.joint:
        operation = problem.request.operation
        return jax_peer(problem, lambda inputs: dict(named(operation.run(request, inputs))), sets, rounds)
    run = run_forward if problem.phase == "forward" else run_backward
    return _compiled(lambda: lambda *arguments: run(request, *arguments), sets, rounds, lambda values: dict(named(values)))


def jax_peer(problem: BenchProblem, function: Function, sets: Sequence[Any], rounds: int) -> Program:
    """A JAX function; its backward phase is what `jax.vjp` returns, with the residuals as arguments."""
    with _full_products(problem.selected.dtype):
        if problem.phase == "forward":
            return _compiled(lambda: lambda inputs: dict(function(inputs)), sets, rounds, dict)
        if problem.joint:
            pairs = [(inputs, dict(named(cotangents))) for inputs, _, cotangents in sets]
            return _compiled(lambda: lambda inputs, cts: _pull(problem, function, inputs)(cts), pairs, rounds, dict)
        forward = jax.jit(lambda inputs: _vjp(problem, function, inputs))
        pairs: list[tuple[Any, Any]] = []
        for inputs, _, cotangents in sets:
            out, pull = forward(inputs)
            pairs.append((pull, {name: ct for name, ct in named(cotangents) if name in out}))
        return _compiled(lambda: lambda pull, cotangents: pull(cotangents)[0], pairs, rounds, dict)


def _vjp(problem: BenchProblem, function: Function, inputs: Any) -> tuple[dict[str, Any], Any]:
    names = problem.differentiated

    def outputs(moving: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in function(inputs._replace(**moving)).items() if name in names}

    return jax.vjp(outputs, problem.request.operation.moving(inputs))


def _pull(problem: BenchProblem, function: Function, inputs: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    out, pull = _vjp(problem, function, inputs)
    return lambda cotangents: {**pull({name: cotangents[name] for name in out})[0]}


def _compiled(
    make: Callable[[], Callable[..., Any]],
    sets: Sequence[tuple[Any, ...]],
    rounds: int,
    results: Callable[[Any], dict[str, Any]],
) -> Program:
    """Compile the function that `make` makes afresh for each round."""
    program: Any = None
    spent: list[float] = []
    for _ in range(rounds):
        if rounds > 1:
            jax.clear_caches()
        start = time.perf_counter()
        program = jax.jit(make()).lower(*sets[0]).compile()
        spent.append(time.perf_counter() - start)
    analysis = program.memory_analysis()
    used = getattr(analysis, "temp_size_in_bytes", None)
    return Program(program, sets, results, compile_s=tuple(spent), temporary_bytes=used)


def _full_products(dtype: str) -> Any:
    """float32 means float32 products for peers too."""
    return jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext()


def median_or_none(values: Sequence[float]) -> float | None:
    """The median; None of nothing."""
    return statistics.median(values) if values else None
