"""The operations that core owns."""

from __future__ import annotations

import functools

from ejkernel._pipeline.operation import Operation
from ejkernel._plugins.catalog import OPERATIONS
from ejkernel.errors import invalid, suggestion
from ejkernel.plugin import resolve

__all__ = ["OPERATIONS", "get_operation"]


@functools.cache
def get_operation(name: str) -> Operation:
    """The operation of this name.

    Raises:
        ValueError: there is none; the message suggests a close name.
    """
    if name not in OPERATIONS:
        raise invalid("operation", repr(name), f"one of {', '.join(sorted(OPERATIONS))}" + suggestion(name, OPERATIONS))
    return resolve(OPERATIONS[name])
