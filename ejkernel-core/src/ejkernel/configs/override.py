"""The two tiers that a user writes by hand: `cfg=` on one call, and `with ejkernel.overlay(...)` around many.

What is written for a call or an operation must fit the implementation that runs at least one of its phases, else it is an
error: nothing is silently ignored. What is written for one implementation waits until that implementation is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ejkernel._plugins.records import Candidate
from ejkernel._plugins.registry import kernel_registry
from ejkernel.call.request import Request
from ejkernel.configs.heuristic import from_heuristic
from ejkernel.configs.overlay import Selector
from ejkernel.configs.portable import BaseOperationConfig
from ejkernel.configs.spaces import build, complete, config_space, fits, knobs, signature
from ejkernel.errors import invalid, suggestion, wrong_type
from ejkernel.plugin import ConfigSpace, Phase

OtherPhase = Callable[[], Candidate | None]
"""What runs the other phase of the call, if anything can; its configs are not looked at."""


def from_override(request: Request, phase: Phase, chosen: Candidate, space: ConfigSpace | None, other_phase: OtherPhase) -> Any:
    """The config that `cfg=` asks for in this phase; None if it is absent or meant for the other phase.

    Raises:
        ValueError: it fits neither phase's implementation, or a value is illegal.
        TypeError: it is the config of something else.
    """
    if request.config is None:
        return None
    if isinstance(request.config, BaseOperationConfig):
        return _from_portable("cfg", request.config, request, phase, chosen, space)
    if space is not None and fits(request.config, space):
        return complete("cfg", request.config, space, lambda: from_heuristic(request, chosen, space))
    other = other_phase()
    if other is not None and fits(request.config, config_space(other)):
        return None
    raise _misfit("cfg", request.config, [chosen] if other is None else [chosen, other])


def from_overlay(
    request: Request,
    phase: Phase,
    chosen: Candidate,
    space: ConfigSpace | None,
    selector: Selector,
    setting: Any,
    other_phase: OtherPhase,
) -> Any:
    """The config that one line of an overlay asks for in this phase; None if it speaks of something else.

    Raises:
        ValueError: it speaks of this implementation and does not fit, or a value is illegal.
        TypeError: likewise, and it is the config of something else.
    """
    if not selector.covers(chosen.id, request.operation.name, phase):
        return None
    argument = f"overlay[{str(selector)!r}]"
    if isinstance(setting, BaseOperationConfig):
        return _from_portable(argument, setting, request, phase, chosen, space)
    if space is not None and fits(setting, space):
        return complete(argument, setting, space, lambda: from_heuristic(request, chosen, space))
    others: list[Candidate] = []
    if selector.phase is None and selector.implementation is not None:
        opposite: Phase = "backward" if phase == "forward" else "forward"
        others = [c for c in kernel_registry.candidates(request.operation.name, opposite) if c.id == chosen.id]
    elif selector.phase is None and (other := other_phase()) is not None:
        others = [other]
    if any(fits(setting, config_space(other)) for other in others):
        return None
    raise _misfit(argument, setting, [chosen, *others])


def _from_portable(
    argument: str, setting: BaseOperationConfig, request: Request, phase: Phase, chosen: Candidate, space: ConfigSpace | None
) -> Any:
    """The heuristic's config with what a portable one says of its knobs; None if it says nothing of them in this phase."""
    setting.check(argument, request.operation.name, request.target.backend)
    said = {} if space is None else setting.knobs(phase, knobs(space.config))
    return build(argument, space.config, said, from_heuristic(request, chosen, space)) if space is not None and said else None


def _misfit(argument: str, setting: Any, chosen: list[Candidate]) -> ValueError | TypeError:
    operation = chosen[0].implementation.operation
    spaces = [(candidate, config_space(candidate)) for candidate in chosen]
    fitting = [
        f"{signature(space.config)} for {candidate.id!r} ({candidate.implementation.phase})"
        for candidate, space in spaces
        if space is not None
    ]
    remedy = "choose with platform= the implementation that it is meant for"
    if not fitting:
        ids = " and ".join(dict.fromkeys(f"{c.id!r} ({c.implementation.phase})" for c in chosen))
        return invalid(argument, _shown(setting), f"no config, as {operation} runs on {ids} without knobs", remedy=remedy)
    expected = " or ".join(fitting)
    if not isinstance(setting, tuple):
        return wrong_type(argument, _shown(setting), f"{expected}, or a mapping of these knobs", remedy=remedy)
    known = [name for _, space in spaces if space is not None for name in knobs(space.config)]
    strange = [name for name, _ in setting if name not in known]
    if strange:
        hint = suggestion(strange[0], known)
        return invalid(argument, f"unknown knob {', '.join(map(repr, strange))}", f"knobs of {expected}{hint}", remedy=remedy)
    return invalid(argument, _shown(setting), f"knobs of one of: {expected}", remedy="give the phases separate configs")


def _shown(setting: Any) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in setting) if isinstance(setting, tuple) else repr(setting)
