"""Run-time checks of the public functions' annotations, under `EJKERNEL_TYPECHECK=1`."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from ejkernel._plugins.settings import is_on
from ejkernel.errors import AnnotationError

Function = TypeVar("Function", bound=Callable[..., Any])


@functools.cache
def on() -> bool:
    """Whether `EJKERNEL_TYPECHECK` asks for checks. Read once, so that calls cost nothing without it."""
    return is_on("EJKERNEL_TYPECHECK")


def checked(function: Function) -> Function:
    """The function itself; with `EJKERNEL_TYPECHECK=1` one that holds each call to its annotations."""
    return _checking(function) if on() else function


def _checking(function: Any) -> Any:
    """Calls the function first: its own refusals are the better sentences, and an explanation leaves it by an exception."""
    _checker()  # what is missing is said before anything runs
    signature = inspect.signature(function)
    hints = functools.cache(lambda: typing.get_type_hints(inspect.unwrap(function)))

    @functools.wraps(function)
    def checking(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        _check(function.__name__, (*_arguments(signature, given, hints()), ("the result", result, hints().get("return", Any))))
        return result

    return checking


def check_records(*records: Any) -> None:
    """Hold the `Inputs` and `Outputs` of one call to their annotations; a field that is None is not there.

    Raises:
        AnnotationError: a field is not what it is annotated.
    """
    fields = (
        (f"{type(record).__name__}.{name}", value, hint)
        for record in records
        for (name, hint), value in zip(_record_hints(type(record)).items(), record, strict=True)
        if value is not None
    )
    _check("record", fields)


@functools.cache
def _record_hints(record: type) -> Mapping[str, Any]:
    return typing.get_type_hints(record)


def _check(whose: str, values: Iterable[tuple[str, Any, Any]]) -> None:
    """Within one call an axis has one size wherever its name stands."""
    from jaxtyping import jaxtyped

    is_bearable = _checker()
    with jaxtyped("context"):
        for name, value, hint in values:
            if not is_bearable(value, hint):
                raise AnnotationError(f"{whose}: {name} is {_described(value)}, but annotated {hint}")


def _arguments(
    signature: inspect.Signature, given: Mapping[str, Any], hints: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    for name, value in given.items():
        if signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
            yield name, value, hints.get(name, Any)  # what a decorator adds is checked by it
            continue
        (options,) = typing.get_args(hints[name])  # Unpack[TypedDict]
        known = typing.get_type_hints(options)
        for option, setting in value.items():
            yield option, setting, known[option]


@functools.cache
def _checker() -> Callable[[Any, Any], bool]:
    try:
        from beartype import BeartypeConf
        from beartype.door import is_bearable
    except ImportError as error:
        raise ImportError("EJKERNEL_TYPECHECK=1 needs beartype: pip install 'ejkernel-core[testing]'") from error
    # As in static checkers, an int will do for a float.
    return functools.partial(is_bearable, conf=BeartypeConf(is_pep484_tower=True))


def _described(value: Any) -> str:
    """An array by dtype and shape, anything else as it prints."""
    if isinstance(value, tuple):
        return f"({', '.join(_described(one) for one in value)})"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return f"{value!r} of type {type(value).__name__}"
