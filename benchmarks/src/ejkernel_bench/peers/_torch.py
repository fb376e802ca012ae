"""Runs torch functions on JAX's arrays, which are handed over by DLPack and, but for float8, never copied."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call import named
from ejkernel_bench._problem import BenchProblem
from ejkernel_bench._program import Program
from ejkernel_bench.peers._peer import Built


def torch_peer(problem: BenchProblem, built: Built, sets: Sequence[Any]) -> Program | str:
    """A torch function as a program; its backward phase is `torch.autograd.grad` on a graph that is kept.

    `compile_s` is the first run, with whatever it compiles and tunes.
    """
    import torch

    on_gpu = problem.request.target.backend == "gpu"
    if on_gpu and (reason := no_gpu()):
        return reason
    if problem.phase == "backward" and built.refuses_backward:
        return built.refuses_backward

    def wait(found: Any) -> None:
        if on_gpu:
            torch.cuda.synchronize()

    prepared = [_fields(built.prepare(_tensors(arguments[0]))) for arguments in sets]
    if problem.phase == "forward":
        run, arguments = _forward(torch, built), [(one,) for one in prepared]
    else:
        run, arguments = _backward(torch, problem, built, prepared, sets)
    start = time.perf_counter()
    wait(run(*arguments[0]))
    spent = time.perf_counter() - start
    results = _results if problem.phase == "forward" else _gradients(problem, built, prepared[0])
    return Program(run, arguments, results, wait, (spent,), _temporary(torch, run, arguments[0]) if on_gpu else None)


def no_gpu() -> str | None:
    """Why torch cannot run on a GPU here; None if it can."""
    import torch

    return None if torch.cuda.is_available() else "this torch has no CUDA"


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` for one size. A function that was compiled eight times in a process would run uncompiled from then on."""
    import torch

    torch.compiler.reset()
    return torch.compile(function, dynamic=False)


def _tensors(inputs: Any) -> Any:
    """The canonical inputs as tensors that share their memory; those in float8 are copies, as bytes may be handed over alone."""
    import torch

    def tensor(array: Any) -> Any:
        if array.dtype.itemsize > 1 or array.dtype.kind in "biu":
            return torch.from_dlpack(array)
        return torch.from_dlpack(jax.lax.bitcast_convert_type(array, jnp.uint8)).view(getattr(torch, array.dtype.name))

    jax.block_until_ready(inputs)
    return inputs._replace(**{name: tensor(array) for name, array in named(inputs)})


def _fields(prepared: Any) -> dict[str, Any]:
    return dict(prepared) if isinstance(prepared, Mapping) else prepared._asdict()


class _Arguments:
    """What a function reads its tensors from, by name."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.__dict__.update(fields)


def _forward(torch: Any, built: Built) -> Callable[..., Any]:
    def run(fields: Mapping[str, Any]) -> Any:
        with torch.no_grad():
            return built.function(_Arguments(fields))

    return run


def _backward(
    torch: Any, problem: BenchProblem, built: Built, prepared: Sequence[dict[str, Any]], sets: Sequence[Any]
) -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
    """The function that is timed, and its arguments: graphs for backward alone, leaves for both phases together."""
    known = problem.request.operation.Inputs._fields  # pyright: ignore[reportAttributeAccessIssue]
    moving = problem.request.operation.moving(problem.base)
    cotangents = [{name: torch.from_dlpack(ct) for name, ct in named(one[2])} for one in sets]
    leaves = [
        {
            name: value.detach().requires_grad_()
            for name, value in fields.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and (name in moving or name not in known)
        }
        for fields in prepared
    ]

    def outputs(fields: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
        found = built.function(_Arguments({**fields, **own}))
        return {name: value for name, value in found.items() if name in problem.differentiated}

    def pull(out: Mapping[str, Any], own: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        cts = [given[name] for name in out]
        found = torch.autograd.grad([*out.values()], [*own.values()], cts, retain_graph=True, allow_unused=True)
        return dict(zip(own, found, strict=True))

    if problem.joint:
        both = [*zip(prepared, leaves, cotangents, strict=True)]
        return (lambda fields, own, given: pull(outputs(fields, own), own, given)), both
    graphs = [outputs(fields, own) for fields, own in zip(prepared, leaves, strict=True)]
    return pull, [*zip(graphs, leaves, cotangents, strict=True)]


def _results(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: jnp.from_dlpack(value.detach().contiguous()) for name, value in found.items() if value is not None}


def _gradients(
    problem: BenchProblem, built: Built, prepared: Mapping[str, Any]
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    moving = problem.request.operation.moving(problem.base)

    def results(found: Mapping[str, Any]) -> dict[str, Any]:
        gradients = _results(built.gradients(found, prepared))
        return {name: value for name, value in gradients.items() if name in moving}

    return results


def _temporary(torch: Any, run: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    """Bytes that were in use for a while: the peak of a run over what is left of it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    kept = run(*arguments)
    torch.cuda.synchronize()
    after = int(torch.cuda.memory_allocated())
    del kept
    return max(0, int(torch.cuda.max_memory_allocated()) - after)
