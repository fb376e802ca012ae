"""The executor that calls operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from ejkernel._pipeline.arguments import public
from ejkernel.errors import wrong_type
from ejkernel.modules._class_api import Module

__all__ = ["Executor", "create_default_executor"]

P = ParamSpec("P")
Result = TypeVar("Result")


class Executor:
    """Calls operations: `executor(FlashAttention(), query, key, value, causal=True)`.

    Args:
        chooser: an `ejkernel.ops.ConfigSelectorChain` that chooses configs; None leaves that to the dispatcher.
    """

    def __init__(self, chooser: Any = None) -> None:
        if chooser is not None and not callable(getattr(chooser, "call", None)):
            raise wrong_type("chooser", repr(chooser), "an ejkernel.ops.ConfigSelectorChain, or None")
        self.chooser = chooser

    def __repr__(self) -> str:
        return "Executor()" if self.chooser is None else f"Executor(<{type(self.chooser).__name__}>)"

    @overload
    def __call__(self, operation: Module[Callable[P, Result]], *args: P.args, **kwargs: P.kwargs) -> Result: ...
    @overload
    def __call__(self, operation: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result: ...
    def __call__(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(operation, type) and issubclass(operation, Module):
            raise wrong_type("operation", f"the class {operation.__name__}", f"an object: {operation.__name__}()")
        if not callable(operation):
            raise wrong_type("operation", repr(operation), "an operation, such as FlashAttention()")
        return operation(*args, **kwargs) if self.chooser is None else self.chooser.call(operation, *args, **kwargs)


@public(dispatches=False)
def create_default_executor() -> Executor:
    """An executor that dispatches as the current settings say."""
    return Executor()
