"""Which config an implementation runs with, and which tier said so.

Tiers: override, overlay, memory, persistent (user cache, then shipped tables), heuristic, error. Each is a generator of what it
would choose, best first, and the first config that may be used is taken. Tuning runs only when asked, never from here; its answers
come back through the tiers before the heuristic. From memory on, no config is taken that is quarantined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ejkernel._plugins.records import Candidate
from ejkernel._plugins.registry import kernel_registry
from ejkernel.call.policy import Policy
from ejkernel.call.request import Request
from ejkernel.configs import memory as _memory, tables as _tables
from ejkernel.configs.entry import Entry
from ejkernel.configs.key import Key
from ejkernel.configs.overlay import Selector
from ejkernel.configs.override import from_overlay, from_override
from ejkernel.configs.quarantine import QuarantineFilter, distance
from ejkernel.configs.question import OtherPhase, Question
from ejkernel.configs.result import AutotuningResult, KeyedConfigs
from ejkernel.configs.spaces import describe, from_plain
from ejkernel.configs.store import USER_CACHE
from ejkernel.errors import NoConfigError
from ejkernel.plugin import Phase
from ejkernel.utils.warn_once import warn_once


@dataclasses.dataclass(frozen=True)
class Selected:
    """A config, the tier that answered, and which configs were passed over as quarantined, each with the reason."""

    config: Any
    tier: str
    quarantined: tuple[str, ...] = ()


def preferred_platform(request: Request, phase: Phase, candidates: Iterable[Candidate] | None = None) -> str | None:
    """Id of the implementation that was measured to be fastest for exactly this call; None if nobody knows.

    An implementation is taken at its entry's word only about itself, so that the entry's own key vouches for its version. Where
    several entries of one tier disagree, the fastest wins.

    Args:
        request: of the call.
        phase: forward or backward.
        candidates: those that may run the call, as tables choose among them and admit nothing; None takes all that are known.
    """
    known = kernel_registry.candidates(request.operation.name, phase) if candidates is None else candidates
    keys = {c.id: Question(request, phase, c).key for c in known}
    results = [value.lookup for _, value in request.policy.overlay if isinstance(value, AutotuningResult)]
    stored = [_tables.choice if tier == "shipped table" else lookup for lookup, tier in stored_tiers(request.policy)]
    for lookup in (*results, *stored):
        found = ((name, lookup(key)) for name, key in keys.items() if key is not None)
        named = [(entry.seconds, name) for name, entry in found if entry is not None and entry.best == name]
        if named:
            return min(named)[1]
    return None


def select(request: Request, phase: Phase, chosen: Candidate, other_phase: OtherPhase) -> Selected | None:
    """The config for the chosen implementation; None if it has no knobs.

    Raises:
        ValueError: an override or overlay that fits nothing, or an illegal value in it.
        TypeError: likewise.
        NoConfigError: no tier has a config.
        QuarantinedError: every config is quarantined.
    """
    question = Question(request, phase, chosen, other_phase)
    written = next(_written(question), None)
    if written is not None:
        return written
    quarantine = QuarantineFilter(request, phase, chosen, question.key)
    if question.space is None:
        if not quarantine.admits(None):
            raise quarantine.nothing_left()
        return None
    for tier in (_stored, _near, _of_heuristic):
        for found in tier(question):
            if quarantine.admits(found.config):
                return dataclasses.replace(found, quarantined=tuple(dict.fromkeys(quarantine.met)))
    raise quarantine.nothing_left()


def _written(question: Question) -> Iterator[Selected]:
    """What the user wrote for this call or the calls around it."""
    config = from_override(question)
    if config is not None:
        yield Selected(config, "override")
    for name, value in question.request.policy.overlay:
        if isinstance(value, KeyedConfigs):
            config, tier = _config_of(question, _entry(question, value.lookup)), "overlay"
            if isinstance(value, AutotuningResult):
                config, tier = (config if _is_legal(question, config) else None), "overlay (autotuning result)"
        else:
            config, tier = from_overlay(question, Selector.parse(name), value), "overlay"
        if config is not None:
            yield Selected(config, tier)


def _stored(question: Question) -> Iterator[Selected]:
    """What was tuned for exactly this call. If the winner is quarantined, the others that were timed follow, the fastest first."""
    for lookup, tier in stored_tiers(question.request.policy):
        entry = _entry(question, lookup)
        config = _config_of(question, entry)
        if entry is not None and _is_legal(question, config):
            yield Selected(config, tier)
            yield from (Selected(config, tier) for config in _also_timed(question, entry))


def _near(question: Question) -> Iterator[Selected]:
    """What plugins ship for calls of nearly these sizes, whose configs need not be legal here."""
    if "persistent" in question.request.policy.closed_tiers or question.key is None:
        return
    for entry in _tables.nearest(question.key):
        config, tier = _config_of(question, entry), f"shipped table (nearest bucket: {entry.key.arrays()})"
        if config is not None and question.allows(config):
            yield Selected(config, tier)
            yield from (Selected(config, tier) for config in _also_timed(question, entry))


def _of_heuristic(question: Question) -> Iterator[Selected]:
    """The implementation's rule of thumb, and if that is quarantined, what differs least from it."""
    if "heuristic" in question.request.policy.closed_tiers:
        raise no_config_without_heuristic(describe(question.chosen))
    config = question.heuristic
    yield Selected(config, "heuristic")
    others = (other for other in question.legal if other != config)
    yield from (Selected(other, "heuristic") for other in sorted(others, key=lambda other: distance(config, other)))


def stored_tiers(policy: Policy) -> list[tuple[Callable[[Key], Entry | None], str]]:
    """The tiers that hold entries by key, as far as they may answer."""
    memory = [] if "memory" in policy.closed_tiers else [(_memory.lookup, "memory")]
    persistent = [(USER_CACHE.lookup, "user cache"), (_tables.lookup, "shipped table")]
    return [*memory, *([] if "persistent" in policy.closed_tiers else persistent)]


def no_config_without_heuristic(name: str) -> NoConfigError:
    """What is raised where the heuristic is closed and nothing before it answered."""
    return NoConfigError(
        f"{name}: no override, overlay or stored entry has a config, and heuristics are not allowed here; pass cfg=, or allow them"
    )


def _entry(question: Question, lookup: Callable[[Key], Entry | None]) -> Entry | None:
    return None if question.key is None else lookup(question.key)


def _config_of(question: Question, entry: Entry | None) -> Any:
    """The entry's config as the implementation's dataclass; a config that this no longer takes is a miss, with one warning."""
    if entry is None or entry.config is None or question.space is None:
        return None
    try:
        return from_plain(question.space.config, entry.config)
    except (ValueError, TypeError) as error:
        warn_once(describe(question.chosen), f"stored config ignored: {error}")
        return None


def _also_timed(question: Question, entry: Entry) -> Iterator[Any]:
    """The other configs that an entry has timings of, as far as they are legal."""
    for timing in sorted(entry.timings, key=lambda timing: timing.median):
        if not timing.failure and timing.config != entry.config:
            config = _config_of(question, dataclasses.replace(entry, config=timing.config))
            if config is not None and question.allows(config):
                yield config


def _is_legal(question: Question, config: Any) -> bool:
    """Whether a stored config may be used; one that may not is told once."""
    if config is None or question.allows(config):
        return config is not None
    warn_once(describe(question.chosen), f"stored config ignored: {config} is not in the search space of its call")
    return False
