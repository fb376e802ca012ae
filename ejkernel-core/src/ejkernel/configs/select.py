"""Which config an implementation runs with, and which tier said so.

Tiers: override, overlay, memory, persistent (user cache, then shipped tables), heuristic, error. Tuning runs only when asked,
never from here; its answers come back through the tiers before the heuristic. From memory on, no tier answers with a config that
is quarantined: the next best of the tier takes its place, or the next tier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ejkernel._plugins.records import Candidate
from ejkernel._plugins.registry import kernel_registry
from ejkernel.call.arrays import with_known_sizes
from ejkernel.call.policy import Policy
from ejkernel.call.request import Request
from ejkernel.configs import memory as _memory, tables as _tables
from ejkernel.configs.entry import Entry
from ejkernel.configs.heuristic import from_heuristic, legal_configs
from ejkernel.configs.key import Key
from ejkernel.configs.overlay import Selector
from ejkernel.configs.override import OtherPhase, from_overlay, from_override
from ejkernel.configs.quarantine import QuarantineFilter
from ejkernel.configs.result import AutotuningResult, KeyedConfigs
from ejkernel.configs.spaces import config_space, describe, from_plain
from ejkernel.configs.store import USER_CACHE
from ejkernel.errors import NoConfigError
from ejkernel.plugin import ConfigSpace, Phase
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
    keys = {c.id: _key(request, phase, c) for c in known}
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
    space = config_space(chosen)
    config = from_override(request, phase, chosen, space, other_phase)
    if config is not None:
        return Selected(config, "override")
    key = _key(request, phase, chosen)
    found = _from_overlays(request, phase, chosen, space, key, other_phase)
    if found is not None:
        return found
    quarantine = QuarantineFilter(request, phase, chosen, key)
    if space is None:
        if not quarantine.admits(None):
            raise quarantine.nothing_left()
        return None
    found = _from_stores(request, chosen, space, key, quarantine) if key is not None else None
    found = found or _from_heuristic(request, chosen, space, quarantine)
    return dataclasses.replace(found, quarantined=tuple(dict.fromkeys(quarantine.met)))


def _from_heuristic(request: Request, chosen: Candidate, space: ConfigSpace, quarantine: QuarantineFilter) -> Selected:
    if "heuristic" in request.policy.closed_tiers:
        raise no_config_without_heuristic(describe(chosen))
    config = from_heuristic(request, chosen, space)
    if not quarantine.admits(config):
        config = quarantine.nearest(config, legal_configs(request, chosen, space))
    return Selected(config, "heuristic")


def _from_overlays(
    request: Request, phase: Phase, chosen: Candidate, space: ConfigSpace | None, key: Key | None, other_phase: OtherPhase
) -> Selected | None:
    for name, value in request.policy.overlay:
        if isinstance(value, KeyedConfigs):
            entry = value.lookup(key) if key is not None else None
            config, tier = _config_of(entry, chosen, space), "overlay"
            if isinstance(value, AutotuningResult):
                legal = config is None or space is None or _is_legal(request, chosen, space, config)
                config, tier = (config if legal else None), "overlay (autotuning result)"
        else:
            config = from_overlay(request, phase, chosen, space, Selector.parse(name), value, other_phase)
            tier = "overlay"
        if config is not None:
            return Selected(config, tier)
    return None


def _from_stores(
    request: Request, chosen: Candidate, space: ConfigSpace, key: Key, quarantine: QuarantineFilter
) -> Selected | None:
    for lookup, tier in stored_tiers(request.policy):
        config = next(_configs_of(lookup(key), request, chosen, space, quarantine), None)
        if config is not None:
            return Selected(config, tier)

    for entry in [] if "persistent" in request.policy.closed_tiers else _tables.nearest(key):
        config = next(_configs_of(entry, request, chosen, space, quarantine, near=True), None)
        if config is not None:
            return Selected(config, f"shipped table (nearest bucket: {entry.key.arrays()})")
    return None


def _configs_of(
    entry: Entry | None,
    request: Request,
    chosen: Candidate,
    space: ConfigSpace,
    quarantine: QuarantineFilter,
    *,
    near: bool = False,
) -> Iterator[Any]:
    """The entry's config; if that is quarantined, the others that it has timings of, the fastest first. Only what is legal for the
    call; of an entry that is `near`, which is of another call, an illegal config is no cause for a warning."""
    config = _config_of(entry, chosen, space)
    if entry is None or config is None:
        return
    legal = _is_legal(request, chosen, space, config, says_so=not near)
    if quarantine.admits(config):
        if legal:
            yield config
        return
    for timing in sorted(entry.timings, key=lambda timing: timing.median):
        if not timing.failure and timing.config != entry.config:
            other = _config_of(dataclasses.replace(entry, config=timing.config), chosen, space)
            if other is not None and _is_legal(request, chosen, space, other, says_so=False) and quarantine.admits(other):
                yield other


def _is_legal(request: Request, chosen: Candidate, space: ConfigSpace, config: Any, *, says_so: bool = True) -> bool:
    """Whether the implementation itself would choose or try a config for the call: whoever can write JSON can write any other."""
    if config in legal_configs(request, chosen, space) or config == from_heuristic(request, chosen, space):
        return True
    if says_so:
        warn_once(describe(chosen), f"stored config ignored: {config} is not in the search space of its call")
    return False


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


def _config_of(entry: Entry | None, chosen: Candidate, space: ConfigSpace | None) -> Any:
    """The entry's config as the implementation's dataclass; a config that this no longer takes is a miss, with one warning."""
    if entry is None or entry.config is None or space is None:
        return None
    try:
        return from_plain(space.config, entry.config)
    except (ValueError, TypeError) as error:
        warn_once(describe(chosen), f"stored config ignored: {error}")
        return None


def _key(request: Request, phase: Phase, candidate: Candidate) -> Key | None:
    """None for calls that nothing can be recorded of: with symbolic dimensions, or with fields that JSON does not know."""
    if with_known_sizes(request.call) is not request.call:
        return None
    try:
        return Key.of(request, phase, candidate)
    except TypeError as error:
        warn_once(type(request.call).__name__, f"calls of it cannot be looked up in the tuning cache: {error}")
        return None
