"""The operations that core brings, and how to find those of every pack."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ejkernel._plugins.catalog import OPERATIONS, operation_module

if TYPE_CHECKING:  # the plugin module beside must stay light
    from ejkernel._pipeline.operation import Operation

__all__ = ["OPERATIONS", "get_operation", "operation_module"]


def get_operation(name: str) -> Operation:
    """The operation of this name.

    Raises:
        ValueError: there is none; the message suggests a close name.
    """
    return operation_module(name, "interface").OPERATION
