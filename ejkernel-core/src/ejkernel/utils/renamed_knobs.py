"""Old names of config knobs, accepted for one release."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ejkernel.errors import warn

Config = TypeVar("Config", bound=type)
_TABLE = "__renamed_knobs__"


def renamed_knobs(**names: str) -> Callable[[Config], Config]:
    """Let a config dataclass take knobs by their old names, too, each with a DeprecationWarning.

    So do the mappings of `cfg=` and of overlays; stored configs are read without a warning.

    Args:
        names: the new name of each old one.
    """

    def decorate(config: Config) -> Config:
        init: Callable[..., None] = config.__init__
        parameters = [*inspect.signature(init).parameters][1:]

        @functools.wraps(init)
        def accept(self: Any, *values: Any, **given: Any) -> None:
            if not names.keys().isdisjoint(given):
                given = with_new_names(config, given, taken=parameters[: len(values)])
            init(self, *values, **given)

        config.__init__ = accept
        setattr(config, _TABLE, names)
        return config

    return decorate


def new_name(config: type, knob: str) -> str:
    """What a knob of a config is called today."""
    return getattr(config, _TABLE, {}).get(knob, knob)


def with_new_names(config: type, values: Mapping[str, Any], *, taken: list[str] | None = None) -> dict[str, Any]:
    """Values by today's names of their knobs, with a warning for each old name.

    Raises:
        TypeError: a knob is given by both of its names.
    """
    found: dict[str, Any] = {}
    for old, value in values.items():
        new = new_name(config, old)
        if new != old:
            if new in values or new in (taken or ()):
                raise TypeError(f"{config.__name__}: {old} is the old name of {new}; give {new} alone")
            warn(f"{config.__name__}: {old} is now called {new}", DeprecationWarning)
        found[new] = value
    return found
