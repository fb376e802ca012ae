"""Modules under import paths of older versions, made of tables: every name is handed on with a DeprecationWarning."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ejkernel.errors import warn
from ejkernel.plugin import resolve


class FormerModule(types.ModuleType):
    """A module that holds nothing: names are found when they are asked for."""

    def __init__(self, path: str, names: Mapping[str, str], note: str, adapt: Callable[[Any], Any] | None) -> None:
        super().__init__(path, f"A former path: {path}.")
        self.__spec__ = importlib.machinery.ModuleSpec(path, None)
        self.__all__ = sorted(names)
        self._names, self._note, self._adapt = names, note, adapt

    def __getattr__(self, name: str) -> Any:
        reference = self._names.get(name)
        if reference is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        now = reference.replace(":", ".") + self._note
        warn(f"{self.__name__}.{name} is now {now}", DeprecationWarning)
        value = resolve(reference)
        return value if self._adapt is None else self._adapt(value)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self._names})


def former_module(
    path: str, names: Mapping[str, str], *, note: str = "", adapt: Callable[[Any], Any] | None = None
) -> FormerModule:
    """Make a module under a former path, so that import statements find it once its parent has been imported.

    Args:
        path: the former path.
        names: its names, and where each lives now: `"package.module:attribute"`.
        note: what the warning adds to the present name.
        adapt: applied to what is found.
    """
    module = FormerModule(path, names, note, adapt)
    sys.modules[path] = module
    return module


def same_names(module: str, names: Iterable[str]) -> dict[str, str]:
    """The table of names that live in one module under the names that they had."""
    return {name: f"{module}:{name}" for name in names}
