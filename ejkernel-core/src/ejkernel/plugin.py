"""All that a plugin author imports: records, markers and the API level.

Standard library and pluggy only, so that importing a plugin's plugin module stays cheap.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import pluggy

from ejkernel.targets import Target, current_target

__all__ = [
    "API_LEVEL",
    "ENTRY_POINT_GROUP",
    "FALLBACK",
    "FIRST_PARTY",
    "FIRST_PARTY_PACKS",
    "OPERATIONS_GROUP",
    "SUPPORTED_API_LEVELS",
    "ConfigSpace",
    "Hooks",
    "Implementation",
    "OperationPack",
    "Phase",
    "Plugin",
    "Quarantine",
    "Target",
    "current_target",
    "hookimpl",
    "hookspec",
    "resolve",
    "tables_beside",
]

API_LEVEL = 3
"""The level of the plugin API that this core speaks. Level 2 added `Implementation.accepts`, level 3 `contract` and `without`."""

SUPPORTED_API_LEVELS = range(1, 4)
"""The levels that this core accepts from plugins."""

ENTRY_POINT_GROUP = "ejkernel.plugins"

FIRST_PARTY: Mapping[str, str] = MappingProxyType(
    {"xla": "ejkernel-xla", "triton": "ejkernel-triton", "pallas": "ejkernel-pallas", "cuda": "ejkernel-cuda"}
)
"""Platform names that are reserved, and the distribution that owns each."""

OPERATIONS_GROUP = "ejkernel.operations"

FIRST_PARTY_PACKS: Mapping[str, str] = MappingProxyType({"core": "ejkernel-core"})
"""Names of packs of operations that are reserved, and the distribution that owns each."""

FALLBACK = "xla"
"""The platform that implements every operation on every device."""

Phase = Literal["forward", "backward"]
"""Phases of an operation, each dispatched by itself."""

hookspec = pluggy.HookspecMarker("ejkernel")
"""Marks what core asks of plugins: the methods of `Hooks`."""

hookimpl = pluggy.HookimplMarker("ejkernel")
"""Marks a plugin's answers: `@hookimpl def ejkernel_plugin() -> Plugin`."""


@dataclasses.dataclass(frozen=True)
class ConfigSpace:
    """The performance knobs of one implementation.

    Attributes:
        config: a frozen dataclass type; its fields never change a result beyond rounding.
        heuristic: `(call, target) -> config`; pure, and legal for every call that `supports` admits.
        search_space: `(call, target) -> configs`; every one legal for that call.
    """

    config: type
    heuristic: Callable[[Any, Target], Any]
    search_space: Callable[[Any, Target], Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One platform's code for one operation and phase.

    References are written `"package.module:attribute"` and resolved on first use, or given as the object itself.

    Attributes:
        operation: name of the operation in core, e.g. `"flash_attention"`.
        target: the code. Forward: `(call, inputs, config) -> outputs`; backward:
            `(call, inputs, outputs, cotangents, config) -> gradients`. The tuples are the operation's own.
        phase: `"forward"` or `"backward"`.
        backends: kinds of device it runs on: `"cpu"`, `"gpu"`, `"tpu"` or `"any"`.
        supports: `(call, target) -> str | None`: None, or the reason for refusing in the user's words. Pure and total.
        configs: a `ConfigSpace`, or None for an implementation without knobs.
        variant: tells two implementations of one platform apart; the id is `platform` or `platform.variant`.
        priority: orders the variants of one platform; larger is preferred.
        version: raised whenever a change makes stored timings meaningless.
        partitioning: `"native"` for plain JAX code that XLA itself partitions over devices; `"opaque"` for code that core
            must split by the operation's sharding rule.
        plain_jax: whether JAX can differentiate the forward code itself (`use(..., custom_gradients=False)`).
        contract: the revision of the operation's contract (`Contract.revisions`) that the code was written for. Core refuses a call
            in which a field of a later revision is not at its default, so that a new field is never ignored; `supports` need not
            know of it.
        without: optional fields of that revision (those that have a default) that the code does not honour, refused likewise.
            Former names do as well.
        accepts: in place of `contract` and `without`, all optional fields that the code honours.
        lowered_from: `() -> str | None`: everything else that decides what the code is lowered to (versions of its compiler,
            settings, sources outside of the package of `target`), after registering its custom calls. Core then keeps the lowered
            code on disk, under a hash of this, the call, JAX's settings and the sources, and other processes neither trace nor
            lower it. It is traced when the program that calls it is lowered. The code must be one that `jax.export` takes, hence
            without callbacks, and be named by a string. None, of the function too: nothing is kept.
    """

    operation: str
    target: str | Callable[..., Any]
    phase: Phase = "forward"
    backends: tuple[str, ...] = ("any",)
    supports: str | Callable[[Any, Target], str | None] | None = None
    configs: str | ConfigSpace | None = None
    variant: str = ""
    priority: int = 0
    version: int = 1
    partitioning: Literal["native", "opaque"] = "opaque"
    plain_jax: bool = False
    contract: int = 1
    without: tuple[str, ...] = ()
    accepts: tuple[str, ...] | None = None
    lowered_from: str | Callable[[], str | None] | None = None


@dataclasses.dataclass(frozen=True)
class Plugin:
    """What a plugin's plugin module answers from `ejkernel_plugin`.

    Attributes:
        name: the platform id; equals the name of the entry point.
        api_level: the `API_LEVEL` it was written against.
        summary: one line for `ejkernel list`.
        requires: import names that must be findable, e.g. `("triton", "jax_triton")`.
        versions: distribution name to version specifier, e.g. `{"triton": ">=3.6,<4"}`.
        implementations: what it brings.
        custom_calls: names of the custom calls that its programs contain, which `jax.export` must be told to let through.
    """

    name: str
    api_level: int
    summary: str
    requires: tuple[str, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    implementations: tuple[Implementation, ...] = ()
    custom_calls: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class OperationPack:
    """Operations that a distribution brings: what the module that its entry point of `ejkernel.operations` names answers from
    `ejkernel_operations`.

    Attributes:
        name: equals the name of the entry point.
        api_level: the `API_LEVEL` it was written against.
        operations: the package whose folders are the operations, e.g. `"acme.operations"`. Each holds `interface.py` with
            `OPERATION`, `reference.py`, `cases.py`, and `order.py` where something was measured.
        functions: the module, or the package of modules, that defines the public functions: each is listed in `__all__` and
            decorated with `@public()`. Empty for none.
    """

    name: str
    api_level: int
    operations: str
    functions: str = ""


@dataclasses.dataclass(frozen=True)
class Quarantine:
    """Configs of one implementation that are known to fail or to give wrong numbers, and where: no tier but a user's own `cfg=`
    or overlay chooses them. All conditions must hold; one that is left out holds always.

    A wanted value is the value itself, a tuple of values, or comparisons of a number, such as `">=64"` or `">16,<=128"`.

    Attributes:
        operation: name of the operation.
        reason: what goes wrong, in the user's words.
        config: name of a knob -> the wanted value.
        call: field of the canonical call -> the wanted value; of an array its dtype, e.g. `{"query": "bfloat16"}`.
        phase: `"forward"` or `"backward"`; None for both.
        variant: of the implementation.
        versions: distribution name to version specifier, e.g. `{"triton": ">=3.6,<3.6.2"}`; all must be installed so.
        capability: specifier of the compute capability, e.g. `">=9.0,<10"`.
    """

    operation: str
    reason: str
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    call: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    phase: Phase | None = None
    variant: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    capability: str = ""


class Hooks:
    """The hooks that core calls on a plugin's plugin module."""

    @hookspec
    def ejkernel_plugin(self) -> Plugin:  # pyright: ignore[reportReturnType]
        """Describe the plugin. Required; imports nothing heavy."""

    @hookspec
    def ejkernel_operations(self) -> OperationPack:  # pyright: ignore[reportReturnType]
        """Describe a pack of operations. Required of what an entry point of `ejkernel.operations` names; imports nothing heavy."""

    @hookspec
    def ejkernel_tuned_configs(self) -> Sequence[str]:  # pyright: ignore[reportReturnType]
        """Paths of the tuning tables (JSON) that the distribution ships, as `tables_beside(__file__)` finds them."""

    @hookspec
    def ejkernel_quarantined_configs(self) -> Sequence[Quarantine]:  # pyright: ignore[reportReturnType]
        """Configs of the plugin's own implementations that must not be chosen; imports nothing heavy."""

    @hookspec
    def ejkernel_diagnose(self, report: Callable[[str, str], None]) -> None:
        """Examine this machine; call `report(name, finding)`. Run by `ejkernel doctor` in a subprocess."""


@functools.cache
def resolve(reference: str | Callable[..., Any]) -> Any:
    """Import what `"package.module:attribute"` names; objects are returned as they are."""
    if not isinstance(reference, str):
        return reference
    module, separator, attribute = reference.partition(":")
    if not separator:
        raise ValueError(f"reference: got {reference!r}, expected 'package.module:attribute'")
    return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))


def tables_beside(module_file: str) -> list[str]:
    """Paths of what `ejkernel tune --out` wrote into the folder `tables` beside a plugin module, a file for each kind of device."""
    return sorted(map(str, Path(module_file).with_name("tables").glob("*.json")))
