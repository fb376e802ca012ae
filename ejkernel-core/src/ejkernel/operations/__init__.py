"""The operations that core brings, and how to find those of every pack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ejkernel._plugins.catalog import OPERATIONS, operation_module

if TYPE_CHECKING:
    from ejkernel._pipeline.operation import get_operation

__all__ = ["OPERATIONS", "get_operation", "operation_module"]


def __getattr__(name: str) -> Any:
    if name != "get_operation":  # the plugin module beside must stay light
        raise AttributeError(f"module 'ejkernel.operations' has no attribute {name!r}")
    from ejkernel._pipeline.operation import get_operation

    return get_operation
