"""The two tiers that a user writes by hand: `cfg=` on one call, and `with ejkernel.overlay(...)` around many.

What is written for a call or an operation must fit the implementation that runs at least one of its phases, else it is an
error: nothing is silently ignored. What is written for one implementation waits until that implementation is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ejkernel._plugins.records import Candidate
from ejkernel._plugins.registry import kernel_registry
from ejkernel.configs.overlay import Selector
from ejkernel.configs.portable import BaseOperationConfig
from ejkernel.configs.question import Question
from ejkernel.configs.spaces import build, complete, config_space, fits, knobs, signature
from ejkernel.errors import invalid, suggestion, wrong_type
from ejkernel.plugin import Phase


def from_override(question: Question) -> Any:
    """The config that `cfg=` asks for in this phase; None if it is absent or meant for the other phase.

    Raises:
        ValueError: it fits neither phase's implementation, or a value is illegal.
        TypeError: it is the config of something else.
    """
    setting = question.request.config
    return None if setting is None else _asked_for("cfg", setting, question, lambda: _opposite(question, None))


def from_overlay(question: Question, selector: Selector, setting: Any) -> Any:
    """The config that one line of an overlay asks for in this phase; None if it speaks of something else.

    Raises:
        ValueError: it speaks of this implementation and does not fit, or a value is illegal.
        TypeError: likewise, and it is the config of something else.
    """
    if not selector.covers(question.chosen.id, question.request.operation.name, question.phase):
        return None
    return _asked_for(f"overlay[{str(selector)!r}]", setting, question, lambda: _opposite(question, selector))


def _asked_for(argument: str, setting: Any, question: Question, others: Callable[[], list[Candidate]]) -> Any:
    """What a setting says of this phase's knobs, the rest from the heuristic; None if it is meant for the other phase."""
    space = question.space
    if isinstance(setting, BaseOperationConfig):
        setting.check(argument, question.request.operation.name, question.request.target.backend)
        said = {} if space is None else setting.knobs(question.phase, knobs(space.config))
        return build(argument, space.config, said, question.heuristic) if space is not None and said else None
    if space is not None and fits(setting, space):
        return complete(argument, setting, space, lambda: question.heuristic)
    of_other_phase = others()
    if any(fits(setting, config_space(other)) for other in of_other_phase):
        return None
    raise _misfit(argument, setting, [question.chosen, *of_other_phase])


def _opposite(question: Question, selector: Selector | None) -> list[Candidate]:
    """The implementations of the other phase that a setting may be meant for: a line for one implementation waits for it."""
    if selector is not None and selector.phase is not None:
        return []
    if selector is not None and selector.implementation is not None:
        phase: Phase = "backward" if question.phase == "forward" else "forward"
        known = kernel_registry.candidates(question.request.operation.name, phase)
        return [one for one in known if one.id == question.chosen.id]
    other = question.other_phase()
    return [] if other is None else [other]


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
