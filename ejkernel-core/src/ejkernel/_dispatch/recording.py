"""Finding every ejkernel call of a program.

The program is traced once under a context of its own, so that nothing compiled before answers for it. Tracing also visits calls
that the program does not make in the end (the unbatched form of a mapped call, the plain forward of a differentiated one);
those that it does make are told apart by a mark in the name stack of their equations.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ejkernel._plugins.records import Candidate
from ejkernel._plugins.task_local import recording
from ejkernel.call.decision import Decision
from ejkernel.call.request import Request
from ejkernel.plugin import Phase

_MARK = re.compile(r"ejkernel\.[^/]*#(\d+)")


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """One phase of one call that a program makes.

    Attributes:
        request: the operation with its canonical call, target and settings.
        phase: forward or backward.
        chosen: the implementation that runs it.
        config: the knobs that it runs with.
        tier: which tier they come from.
    """

    request: Request
    phase: Phase
    chosen: Candidate
    config: Any
    tier: str


class _Recorder:
    """Identity is the point: each is a trace context of its own."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []


def note(request: Request, decision: Decision) -> str:
    """Note a call that is about to be traced; returns the mark that its equations shall carry, empty when nobody records."""
    recorder = recording.value  # pyright: ignore[reportAttributeAccessIssue]
    if recorder is None or decision.chosen is None:
        return ""
    recorder.calls.append(RecordedCall(request, decision.phase, decision.chosen, decision.config, decision.tier))
    return f"#{len(recorder.calls) - 1}"


def record_calls(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[RecordedCall, ...]:
    """Every ejkernel call that a function makes, each phase and each distinct call once. Nothing is computed.

    Calls are as the kernels see them: under `vmap` with the folded batch, under `shard_map` and on explicit meshes of one
    shard, under `grad` in both phases. On Auto meshes the shards are not known before compilation, and the call on the whole
    arrays stands for them.

    Args:
        function: the program; `jax.grad` and others may be applied to it.
        *args: its arguments, as arrays or `jax.ShapeDtypeStruct`s; others, such as `causal=True`, are given to it as they are.
        **kwargs: its keyword arguments.
    """
    recorder = _Recorder()
    call, arrays = over_arrays(function, args, kwargs, lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype"))
    with recording(recorder):
        program = jax.make_jaxpr(call)(arrays)
    calls, recorder.calls = recorder.calls, []
    made = dict.fromkeys(calls[mark] for mark in sorted(set(_marks(program))))
    return tuple(made)


def over_arrays(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], moving: Callable[[Any], bool]
) -> tuple[Callable[[list[Any]], Any], list[Any]]:
    """The call as a function of those of its leaves that move, and these."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if moving(leaf)]

    def call(arrays: list[Any]) -> Any:
        filled = {**dict(enumerate(leaves)), **dict(zip(places, arrays, strict=True))}
        args, kwargs = jax.tree.unflatten(tree, filled.values())
        return function(*args, **kwargs)

    return call, [leaves[place] for place in places]


def _marks(program: Any) -> Iterator[int]:
    for equation in program.eqns:
        for mark in _MARK.findall(str(equation.source_info.name_stack)):
            yield int(mark)
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
                if hasattr(inner, "eqns"):
                    yield from _marks(inner)
