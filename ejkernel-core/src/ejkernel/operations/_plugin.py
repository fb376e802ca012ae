"""The plugin module of core's own operations: found by its entry point, as everybody's."""

from __future__ import annotations

from ejkernel.plugin import API_LEVEL, OperationPack, hookimpl


@hookimpl
def ejkernel_operations() -> OperationPack:
    return OperationPack(name="core", api_level=API_LEVEL, operations="ejkernel.operations", functions="ejkernel.modules")
