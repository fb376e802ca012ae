"""The former place of what `ejkernel.call` has: names are handed on with a DeprecationWarning."""

from __future__ import annotations

import warnings
from typing import Any

from ejkernel import call

_NAMES = ("ArraySpec", "Bound", "Call", "Cost", "Request", "vary_like")


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'ejkernel.operation' has no attribute {name!r}")
    warnings.warn(f"ejkernel.operation.{name} is now ejkernel.call.{name}", DeprecationWarning, stacklevel=2)
    return getattr(call, name)
