"""Configs as users write them: a dataclass, or a mapping of some of its knobs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from ejkernel._plugins.containment import contained, imported, raised
from ejkernel._plugins.records import Candidate
from ejkernel.errors import NoConfigError, invalid, suggestion, wrong_type
from ejkernel.plugin import ConfigSpace
from ejkernel.utils.renamed_knobs import new_name, with_new_names

_CHECKED_TYPES: Mapping[Any, tuple[type, ...]] = {
    **dict.fromkeys((bool, "bool"), (bool,)),
    **dict.fromkeys((int, "int"), (int,)),
    **dict.fromkeys((float, "float"), (int, float)),
    **dict.fromkeys((str, "str"), (str,)),
}


def as_setting(argument: str, config: Any) -> Any:
    """Bring a user's config into hashable form: a dataclass as it is, a mapping as sorted pairs of knob and value.

    Raises:
        TypeError: neither of the two, or something in it cannot be hashed.
    """
    if isinstance(config, Mapping):
        for name in config:
            if not isinstance(name, str):
                raise wrong_type(argument, f"the knob {name!r}", "names of knobs as keys")
        if not config:
            raise invalid(argument, "an empty mapping", "at least one knob")
        config = tuple(sorted(((name, _tupled(value)) for name, value in config.items()), key=lambda pair: pair[0]))
        remedy = "give every knob a number, a string, a bool, None or a tuple of these"
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        remedy = "declare the dataclass with frozen=True"
    else:
        raise wrong_type(argument, repr(config), "the config dataclass of an implementation, or a mapping of its knobs")
    try:
        hash(config)
    except TypeError as error:
        raise wrong_type(argument, repr(config), "a hashable config", remedy=remedy) from error
    return config


def config_space(candidate: Candidate) -> ConfigSpace | None:
    """The knobs of an implementation; None if it has none.

    Raises:
        NoConfigError: they cannot be imported, or are something else.
    """
    reference = candidate.implementation.configs
    if reference is None:
        return None
    try:
        space = imported(f"configs of {describe(candidate)}", reference)
    except Exception as error:
        raise NoConfigError(f"{describe(candidate)}: its configs cannot be imported: {raised(error)}") from error
    if not isinstance(space, ConfigSpace) or not dataclasses.is_dataclass(space.config):
        raise NoConfigError(f"{describe(candidate)}: configs is {space!r}, expected a ConfigSpace of a dataclass")
    return space


def describe(candidate: Candidate) -> str:
    """`'triton' (rms_norm, backward)`."""
    return f"{candidate.id!r} ({candidate.implementation.operation}, {candidate.implementation.phase})"


def knobs(config_type: type) -> tuple[str, ...]:
    """Names of the fields that a config is made from."""
    return tuple(field.name for field in dataclasses.fields(config_type) if field.init)


def signature(config_type: type) -> str:
    """`BlockConfig(block_rows, num_warps)`."""
    return f"{config_type.__name__}({', '.join(knobs(config_type))})"


def fits(setting: Any, space: ConfigSpace | None) -> bool:
    """Whether a setting is meant for these knobs: their dataclass, or pairs that all name one of them."""
    if space is None:
        return False
    if isinstance(setting, tuple):
        return {new_name(space.config, name) for name, _ in setting} <= {*knobs(space.config)}
    return isinstance(setting, space.config)


def complete(argument: str, setting: Any, space: ConfigSpace, heuristic: Callable[[], Any]) -> Any:
    """The config that a fitting setting asks for; knobs that a mapping leaves open come from the heuristic."""
    return build(argument, space.config, dict(setting), heuristic()) if isinstance(setting, tuple) else setting


def build(argument: str, config_type: type, values: Mapping[str, Any], base: Any = None) -> Any:
    """Make a config from knobs by name, over `base` if one is given.

    Raises:
        ValueError: an unknown knob, or a value that the config itself refuses.
        TypeError: a value of a wrong type, a knob missing, or one given by its old name and its new one.
    """
    names = knobs(config_type)
    values = with_new_names(config_type, values)
    unknown = [name for name in values if name not in names]
    if unknown:
        expected = f"knobs of {signature(config_type)}" + suggestion(unknown[0], names)
        raise invalid(argument, f"unknown knob {', '.join(map(repr, unknown))}", expected)
    for field in dataclasses.fields(config_type):
        types = _CHECKED_TYPES.get(field.type)
        if types and field.name in values and type(values[field.name]) not in types:
            raise wrong_type(
                argument, f"{field.name}={values[field.name]!r}", f"{types[-1].__name__} there, in {signature(config_type)}"
            )
    make = functools.partial(config_type, **values) if base is None else lambda: dataclasses.replace(base, **values)
    try:
        return contained(signature(config_type), make)
    except Exception as error:
        word = wrong_type if isinstance(error, TypeError) else invalid
        shown = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise word(argument, shown, f"legal values for {signature(config_type)}", remedy=str(error) or raised(error)) from error


def to_plain(config: Any) -> dict[str, Any] | None:
    """A config as JSON values; None for an implementation without knobs.

    Raises:
        TypeError: the config would not come back from JSON as it went.
    """
    if config is None:
        return None
    values = {name: getattr(config, name) for name in knobs(type(config))}
    for name, value in values.items():
        if not _survives_json(value):
            raise wrong_type(name, repr(value), "a number, string, bool, None or tuple of these, as configs are stored as JSON")
    return values


def from_plain(config_type: type, values: Mapping[str, Any]) -> Any:
    """The config that `to_plain` wrote; raises as `build` does."""
    return build("stored config", config_type, {new_name(config_type, name): _tupled(value) for name, value in values.items()})


def _survives_json(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_survives_json, value))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and value - value == 0)


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, (list, tuple)) else value
