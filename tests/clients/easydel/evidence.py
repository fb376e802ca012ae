"""Which functions of ejkernel EasyDeL called, so that a job proves that its mechanism ran."""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

calls: collections.Counter[str] = collections.Counter()
"""Calls since the last `calls.clear()`; a compiled program counts when it is traced."""


def count() -> None:
    """Count the calls of every public function of ejkernel that a module of EasyDeL imported by name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("easydel.") and module is not None:
            for attribute, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and value.__module__.startswith("ejkernel.modules"):
                    setattr(module, attribute, _counting(value))


def _counting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[function.__name__] += 1
        return function(*args, **kwargs)

    counted.__module__ = "counted"
    return counted
