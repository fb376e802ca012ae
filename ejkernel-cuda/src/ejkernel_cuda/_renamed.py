"""Old names of config knobs, accepted for one release."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Config = TypeVar("Config", bound=type)


def renamed_knobs(**names: str) -> Callable[[Config], Config]:
    """Let a config dataclass take knobs by their old names, too, each with a DeprecationWarning.

    Args:
        names: the new name of each old one.
    """

    def decorate(config: Config) -> Config:
        init: Callable[..., None] = config.__init__
        parameters = [*inspect.signature(init).parameters][1:]

        @functools.wraps(init)
        def accept(self: Any, *values: Any, **given: Any) -> None:
            for old in [name for name in given if name in names]:
                new = names[old]
                if new in given or new in parameters[: len(values)]:
                    raise TypeError(f"{config.__name__}: {old} is the old name of {new}; give {new} alone")
                warnings.warn(f"{config.__name__}: {old} is now called {new}", DeprecationWarning, stacklevel=2)
                given[new] = given.pop(old)
            init(self, *values, **given)

        config.__init__ = accept
        return config

    return decorate
