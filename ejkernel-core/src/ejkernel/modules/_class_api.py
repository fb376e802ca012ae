"""Class APIs of the public functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

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


def class_api(name: str, function: Function) -> type[Module[Function]]:
    """The class API of a public function."""
    return type(
        name,
        (Module,),
        {"function": staticmethod(function), "__doc__": function.__doc__, "__module__": function.__module__},
    )
