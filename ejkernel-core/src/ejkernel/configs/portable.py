"""Configs under names that clients use with every platform: hints, of which the implementation that runs takes those it knows.

The rule. `platform` and `backend` are demands. Every other field is a hint: one that the chosen implementation has as a knob is
used, and must be legal there; the others speak of other machines and change nothing, as no config ever changes a result. A hint
that is None is not said, and left to the lower tiers.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from ejkernel.errors import invalid, wrong_type
from ejkernel.plugin import Phase

_BACKENDS = ("any", "cpu", "gpu", "tpu")
_BACKWARD = "_backward"
_DEMANDS = ("platform", "backend")

Self = TypeVar("Self", bound="BaseOperationConfig")


@dataclasses.dataclass(frozen=True)
class Params:
    """Tile sizes of one phase; None leaves one to the implementation.

    Attributes:
        q_blocksize, kv_blocksize: queries and keys of a tile of attention.
        blocksize_m, blocksize_n, blocksize_k: rows, columns and products of a tile of a matrix product.
        blocksize_heads, blocksize_keys: heads and keys that are loaded together.
        num_key_splits: parts into which the keys of one query are split.
        num_warps, num_stages: warps of a block and stages of its pipeline.
    """

    blocksize_m: int | None = None
    blocksize_k: int | None = None
    blocksize_n: int | None = None
    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    blocksize_heads: int | None = None
    blocksize_keys: int | None = None
    num_key_splits: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.kv_blocksize is not None and self.blocksize_k is not None and self.kv_blocksize != self.blocksize_k:
            raise invalid("blocksize_k", self.blocksize_k, f"kv_blocksize = {self.kv_blocksize}: both are block_k")


@dataclasses.dataclass(frozen=True)
class FwdParams(Params):
    """Tile sizes of the forward phase."""


@dataclasses.dataclass(frozen=True)
class BwdParams(Params):
    """Tile sizes of the backward phase."""


_KNOBS: Mapping[str, str] = {
    "q_blocksize": "block_q",
    "kv_blocksize": "block_k",
    "blocksize_m": "block_m",
    "blocksize_n": "block_n",
    "blocksize_k": "block_k",
    "blocksize_heads": "block_h",
    "num_key_splits": "num_splits",
}
"""Names of fields of `Params` as knobs, beside the name itself."""


@dataclasses.dataclass(frozen=True)
class BaseOperationConfig:
    """A config for whichever implementation runs: demands, and hints.

    Attributes:
        platform: as the argument `platform=` of the public functions; "auto" demands nothing.
        backend: the kind of device that the call must run on: "any", "cpu", "gpu" or "tpu".

    Raises:
        ValueError: an unknown backend, or a number below 1.
        TypeError: a field of a wrong type.
    """

    platform: str = "auto"
    backend: str = "any"

    operations: ClassVar[tuple[str, ...]] = ()
    """Names of the operations that it is for; none is all."""

    def __post_init__(self) -> None:
        for name, made in (("fwd_params", FwdParams), ("bwd_params", BwdParams)):
            given = getattr(self, name, None)
            if isinstance(given, Mapping):
                object.__setattr__(self, name, made(**given))
        _check_fields(self)
        if self.backend not in _BACKENDS:
            raise invalid("backend", repr(self.backend), f"one of {', '.join(_BACKENDS)}")

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls: type[Self], values: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote; TypeError for an unknown field."""
        read: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls(**read)

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_json(cls: type[Self], text: str) -> Self:
        """Read what `to_json` wrote."""
        return cls.from_dict(json.loads(text))

    def check(self, argument: str, operation: str, backend: str) -> None:
        """Refuse a config of another operation, or for another kind of device."""
        if self.operations and operation not in self.operations:
            raise wrong_type(argument, type(self).__name__, f"a config of {operation}, not of {' or '.join(self.operations)}")
        if self.backend not in ("any", backend):
            raise invalid(f"{argument}.backend", repr(self.backend), f"'any' or {backend!r}, where this call runs")

    def knobs(self, phase: Phase, names: Iterable[str]) -> dict[str, Any]:
        """What is said about these knobs in a phase.

        A knob `block_q` is the forward phase's where the same config has `block_q_backward`, and that one is the backward
        phase's; elsewhere it is the phase's own.
        """
        names = tuple(names)
        forward, backward = self._said("fwd_params"), self._said("bwd_params")
        found: dict[str, Any] = {}
        for name in names:
            own = backward if phase == "backward" and name + _BACKWARD not in names else forward
            said, knob = (backward, name.removesuffix(_BACKWARD)) if name.endswith(_BACKWARD) else (own, name)
            if knob in said:
                found[name] = said[knob]
        return found

    def _said(self, params: str) -> dict[str, Any]:
        """Everything that is not None, by knob: the phase's own before what holds for both."""
        common = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _DEMANDS}
        own = getattr(self, params, None)
        mine = {} if own is None else {f.name: getattr(own, f.name) for f in dataclasses.fields(own)}
        given = {
            name: value for name, value in {**common, **mine}.items() if value is not None and not isinstance(value, Params)
        }
        return {**given, **{_KNOBS[name]: value for name, value in given.items() if name in _KNOBS}}


def demanded_platform(cfg: Any, platform: Any) -> Any:
    """The `platform=` of a call whose config may demand one too.

    Raises:
        ValueError: they demand different ones.
    """
    demanded = cfg.platform if isinstance(cfg, BaseOperationConfig) else "auto"
    if str(demanded).lower() == "auto":
        return platform
    if platform is None or platform == "auto":
        return demanded
    if str(platform).lower() != str(demanded).lower():
        raise invalid("cfg.platform", repr(str(demanded)), f"'auto' or {platform!r}, as platform= says")
    return platform


def _check_fields(config: Any) -> None:
    """Fields have the types that their annotations name, and numbers are at least 1."""
    allowed = _field_types(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not _is_of(value, allowed[field.name]):
            raise wrong_type(field.name, repr(value), str(field.type))
        numbers = value if isinstance(value, tuple) else (value,)
        if any(type(number) is int and number < 1 for number in numbers):
            raise invalid(field.name, value, "a value >= 1")


@functools.cache
def _field_types(config: type) -> Mapping[str, frozenset[Any]]:
    """The types of each field of a config: the members of its union; `tuple` for a tuple of numbers."""
    hints = typing.get_type_hints(config)
    return {field.name: frozenset(_union_members(hints[field.name])) for field in dataclasses.fields(config)}


def _union_members(hint: Any) -> Iterable[Any]:
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return (typing.get_origin(member) or member for member in members)


def _is_of(value: Any, allowed: frozenset[Any]) -> bool:
    """Whether a field of the allowed types may have the value: a bool is no number, a tuple holds numbers."""
    if isinstance(value, Params):  # plain `Params` are for either phase
        return any(isinstance(kind, type) and issubclass(kind, type(value)) for kind in allowed)
    if isinstance(value, tuple):
        return tuple in allowed and bool(value) and all(type(number) is int for number in value)
    return type(value) in allowed or (isinstance(value, str) and str in allowed)
