"""What an implementation itself says of its configs: the rule of thumb that is the last tier, and which are legal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ejkernel._plugins.containment import contained, raised
from ejkernel._plugins.records import Candidate
from ejkernel.call.arrays import with_known_sizes
from ejkernel.call.request import Request
from ejkernel.configs.spaces import describe
from ejkernel.errors import NoConfigError
from ejkernel.plugin import ConfigSpace


def from_heuristic(request: Request, chosen: Candidate, space: ConfigSpace) -> Any:
    """The heuristic's config.

    Raises:
        NoConfigError: the heuristic raised, or returned something else; this is the end of the tiers.
    """
    name = describe(chosen)
    try:
        config = contained(name, space.heuristic, with_known_sizes(request.call), request.target)
    except Exception as error:  # code of a plugin, whose failure is reported under its name
        raise _failed(request, chosen, "heuristic", error) from error
    if not isinstance(config, space.config):
        raise NoConfigError(f"{name}: its heuristic returned {config!r}, expected {space.config.__name__}")
    return config


def legal_configs(request: Request, chosen: Candidate, space: ConfigSpace) -> Sequence[Any]:
    """The search space of a call.

    Raises:
        NoConfigError: the search space raised.
    """
    try:
        return contained(describe(chosen), lambda: tuple(space.search_space(with_known_sizes(request.call), request.target)))
    except Exception as error:  # code of a plugin, whose failure is reported under its name
        raise _failed(request, chosen, "search space", error) from error


def _failed(request: Request, chosen: Candidate, what: str, error: Exception) -> NoConfigError:
    return NoConfigError(
        f"{describe(chosen)} on {request.target}: its {what} raised {raised(error)}; pass cfg= to go around it, and report it to "
        f"{chosen.distribution}"
    )
