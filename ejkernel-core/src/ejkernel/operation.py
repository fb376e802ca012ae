"""The former place of what `ejkernel.call` has: names are handed on with a DeprecationWarning."""

from __future__ import annotations

from typing import Any

from ejkernel import call
from ejkernel.errors import warn

_NAMES = ("ArraySpec", "Bound", "Call", "Cost", "Request", "vary_like")


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'ejkernel.operation' has no attribute {name!r}")
    warn(f"ejkernel.operation.{name} is now ejkernel.call.{name}", DeprecationWarning)
    return getattr(call, name)
