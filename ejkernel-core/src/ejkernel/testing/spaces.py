"""What must hold for the knobs of an implementation, whatever the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ejkernel.plugin import ConfigSpace, Target
from ejkernel.tuning import from_plain, to_plain


def check_space(space: ConfigSpace, call: Any, target: Target) -> Sequence[Any]:
    """The configs of a call, after asserting that they can be tuned, stored and chosen among.

    Heuristic and search space depend on nothing but call and target; there is no config twice, and all come back from JSON as
    they went. The heuristic's config is the first of those returned, whether or not the search space repeats it.
    """
    chosen, configs = space.heuristic(call, target), tuple(space.search_space(call, target))
    where = f"for {call} on {target}"
    assert isinstance(chosen, space.config), f"the heuristic returned {chosen!r} {where}"
    assert space.heuristic(call, target) == chosen, f"the heuristic returned something else the second time {where}"
    assert tuple(space.search_space(call, target)) == configs, f"the search space was another the second time {where}"
    assert configs, f"the search space is empty {where}"
    assert len({*configs}) == len(configs), f"the search space has a config twice {where}"
    found = tuple(dict.fromkeys((chosen, *configs)))
    for config in found:
        assert isinstance(config, space.config), f"the search space has {config!r} {where}"
        values = to_plain(config)
        assert values is not None and from_plain(space.config, values) == config, f"{config} is not what its JSON says"
    return found
