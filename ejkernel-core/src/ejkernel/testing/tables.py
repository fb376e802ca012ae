"""Whether what a plugin ships as tuning tables is of use to anybody."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ejkernel._pipeline.operation import get_operation
from ejkernel._plugins.catalog import OPERATIONS
from ejkernel._plugins.records import Candidate
from ejkernel.call.arrays import ArraySpec
from ejkernel.call.policy import policy_for_call
from ejkernel.call.request import Request
from ejkernel.configs.entry import Entry
from ejkernel.configs.key import Key
from ejkernel.configs.spaces import config_space, from_plain
from ejkernel.plugin import Target


def unused(entry: Entry, candidates: Sequence[Candidate]) -> str | None:
    """Why an entry of a shipped table answers no call of today, or with what its implementation no longer takes; None if it does.

    Args:
        entry: of the table.
        candidates: the implementations that the plugin brings.
    """
    key = entry.key
    own = [c for c in candidates if (c.id, c.implementation.operation) == (key.implementation, key.operation)]
    candidate = next((c for c in own if c.implementation.phase == key.phase), None)
    if candidate is None or key.operation not in OPERATIONS:
        return f"the plugin has no {key.implementation!r} for {key.operation} ({key.phase})"
    if key.version != candidate.implementation.version:
        return f"it is of version {key.version} of {key.implementation!r}, which is at {candidate.implementation.version}"
    target = Target(key.backend, key.device_kind, key.compute_capability or None)
    try:
        call = _call_of(key)
    except TypeError as error:
        return f"its call is not one of today's {key.operation}: {error}"
    owner = get_operation(key.operation)
    request = Request(owner, call, target, policy_for_call(key.operation, candidate.platform))
    if Key.of(request, candidate.implementation.phase, candidate).released != key.with_later_fields(owner).released:
        return f"its call is not one of today's {key.operation}: {call}"
    return _unfit(entry, candidate, call, target)


def _unfit(entry: Entry, candidate: Candidate, call: Any, target: Target) -> str | None:
    """What is wrong with its configs."""
    space = config_space(candidate)
    if space is None:
        return None if entry.config is None else "it has a config, and its implementation has no knobs"
    try:
        config, *_ = (from_plain(space.config, plain or {}) for plain in (entry.config, *(t.config for t in entry.timings)))
    except (TypeError, ValueError) as error:
        return f"a config is not one of today's {space.config.__name__}: {error}"
    return None if config in space.search_space(call, target) else f"{config} is not in the search space of its call"


def _call_of(key: Key) -> Any:
    """The call that a key is of; TypeError where its fields are not those of today."""
    fields = {name: _decoded(value) for name, value in json.loads(key.call).items()}
    return get_operation(key.operation).Call(**fields)


def _decoded(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"dtype", "shape"}:
        return ArraySpec(tuple(value["shape"]), value["dtype"])
    return tuple(map(_decoded, value)) if isinstance(value, list) else value
