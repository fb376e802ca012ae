"""What every tier of config selection is asked: which config for this call, in this phase, on this implementation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from ejkernel._plugins.containment import contained, raised
from ejkernel._plugins.records import Candidate
from ejkernel.call.arrays import with_known_sizes
from ejkernel.call.request import Request
from ejkernel.configs.key import Key
from ejkernel.configs.spaces import config_space, describe
from ejkernel.errors import NoConfigError
from ejkernel.plugin import ConfigSpace, Phase
from ejkernel.utils.warn_once import warn_once

OtherPhase = Callable[[], Candidate | None]
"""What runs the other phase of the call, if anything can; its configs are not looked at."""


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """One phase of a call on the implementation that was chosen, and what that says of its own configs.

    Attributes:
        request, phase, chosen: of the call.
        other_phase: for settings that fit that one alone.
    """

    request: Request
    phase: Phase
    chosen: Candidate
    other_phase: OtherPhase = lambda: None

    @cached_property
    def space(self) -> ConfigSpace | None:
        """The knobs; None without any. Raises NoConfigError."""
        return config_space(self.chosen)

    @cached_property
    def key(self) -> Key | None:
        """None for calls that nothing can be recorded of: with symbolic dimensions, or with fields that JSON does not know."""
        if with_known_sizes(self.request.call) is not self.request.call:
            return None
        try:
            return Key.of(self.request, self.phase, self.chosen)
        except TypeError as error:
            warn_once(type(self.request.call).__name__, f"calls of it cannot be looked up in the tuning cache: {error}")
            return None

    @cached_property
    def heuristic(self) -> Any:
        """The rule of thumb, of an implementation with knobs.

        Raises:
            NoConfigError: the heuristic raised, or returned something else; this is the end of the tiers.
        """
        assert self.space is not None
        config = self._said("heuristic", self.space.heuristic)
        if not isinstance(config, self.space.config):
            name = describe(self.chosen)
            raise NoConfigError(f"{name}: its heuristic returned {config!r}, expected {self.space.config.__name__}")
        return config

    @cached_property
    def legal(self) -> Sequence[Any]:
        """The search space of the call, of an implementation with knobs. Raises NoConfigError if the search space raised."""
        space = self.space
        assert space is not None
        return self._said("search space", lambda call, target: tuple(space.search_space(call, target)))

    def allows(self, config: Any) -> bool:
        """Whether the implementation itself would choose or try a config for the call: whoever can write JSON can write any."""
        return config in self.legal or config == self.heuristic

    def _said(self, what: str, ask: Callable[..., Any]) -> Any:
        name, target = describe(self.chosen), self.request.target
        try:
            return contained(name, ask, with_known_sizes(self.request.call), target)
        except Exception as error:  # code of a plugin, whose failure is reported under its name
            remedy = f"pass cfg= to go around it, and report it to {self.chosen.distribution}"
            raise NoConfigError(f"{name} on {target}: its {what} raised {raised(error)}; {remedy}") from error
