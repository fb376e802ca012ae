"""Class APIs of the public functions, and the executor that calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from ejkernel._pipeline.arguments import public
from ejkernel.errors import wrong_type

Function = TypeVar("Function", bound=Callable[..., Any], covariant=True)
P = ParamSpec("P")
Result = TypeVar("Result")


class Module(Generic[Function]):
    """A public function as an object without state: `RmsNorm()(x, scale)` is `rms_norm(x, scale)`."""

    if TYPE_CHECKING:  # a property, so that checkers see every overload of the function

        @property
        def __call__(self) -> Function: ...

        function: Callable[..., Any]
    else:

        def __call__(self, *args, **kwargs):
            return type(self).function(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the function: libraries drop keywords that they do not find in it."""
        return inspect.signature(type(self).function)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def class_form(name: str, function: Function) -> type[Module[Function]]:
    """The class API of a public function."""
    return type(
        name,
        (Module,),
        {"function": staticmethod(function), "__doc__": function.__doc__, "__module__": function.__module__},
    )


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


@public()
def create_default_executor() -> Executor:
    """An executor that dispatches as the current settings say."""
    return Executor()
