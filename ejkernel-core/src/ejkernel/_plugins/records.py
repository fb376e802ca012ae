"""What became of each plugin that was found, and where each implementation comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from ejkernel._plugins.requirements import canonical
from ejkernel.plugin import (
    ENTRY_POINT_GROUP,
    FIRST_PARTY,
    FIRST_PARTY_PACKS,
    OPERATIONS_GROUP,
    Implementation,
    OperationPack,
    Plugin,
    Quarantine,
)

OWNERS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {ENTRY_POINT_GROUP: FIRST_PARTY, OPERATIONS_GROUP: FIRST_PARTY_PACKS}
)
"""Group of entry points -> names in it that are reserved -> the distribution that owns each."""

PLUGIN_IMPORT_BUDGET = 0.005
"""Seconds that importing a plugin's plugin module may take; `ejkernel doctor` remarks on those that take more."""

PLUGIN_IMPORT_PATIENCE = 1.0
"""Seconds from which on every program is warned."""

State = Literal["ok", "disabled", "missing requirement", "incompatible", "conflict", "broken"]


@dataclasses.dataclass(frozen=True)
class PluginRecord:
    """One entry point and its state.

    Attributes:
        name: the entry point's name: of a platform, or of a pack of operations.
        distribution: the distribution that ships it.
        version: that distribution's version.
        value: the module that the entry point names.
        state: what became of it.
        reason: why it is not `ok`, in the user's words.
        traceback: of the exception that broke it, if any.
        group: of the entry point.
        plugin: the description of a platform, when one could be had.
        pack: the description of a pack of operations, when one could be had.
        operations: the names of its operations.
        tables: paths of the tuning tables that it ships.
        quarantine: which of its configs must not be chosen.
        module: the plugin module, for further hooks.
        seconds: how long importing the plugin module took; see `PLUGIN_IMPORT_BUDGET`.
        heavy: top-level packages that importing it newly imported, beyond the standard library and its own.
    """

    name: str
    distribution: str
    version: str
    value: str
    state: State
    reason: str = ""
    traceback: str = ""
    group: str = ENTRY_POINT_GROUP
    plugin: Plugin | None = None
    pack: OperationPack | None = None
    operations: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    quarantine: tuple[Quarantine, ...] = ()
    module: Any = None
    seconds: float = 0.0
    heavy: tuple[str, ...] = ()

    @property
    def slow(self) -> bool:
        """Whether importing its plugin module takes long or brings in other packages."""
        return self.seconds > PLUGIN_IMPORT_BUDGET or bool(self.heavy)

    @property
    def ok(self) -> bool:
        return self.state == "ok"

    @property
    def first_party(self) -> bool:
        return OWNERS.get(self.group, {}).get(self.name) == canonical(self.distribution)

    @property
    def who(self) -> str:
        """In the user's words."""
        kind = "pack of operations" if self.group == OPERATIONS_GROUP else "plugin"
        return f"ejkernel {kind} {self.name!r} ({f'{self.distribution} {self.version}'.strip()})"

    def to_dict(self) -> dict[str, Any]:
        fields = ("name", "distribution", "version", "value", "state", "reason", "traceback", "seconds", "slow")
        lists: dict[str, Any] = {"tables": [*self.tables], "heavy": [*self.heavy]}
        if self.group == OPERATIONS_GROUP:
            lists = {"operations": [*self.operations], "heavy": [*self.heavy]}
        return {**{field: getattr(self, field) for field in fields}, **lists, "first_party": self.first_party}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An implementation together with who brings it.

    Attributes:
        platform: the platform's name.
        implementation: the plugin author's record.
        distribution: who ships it; `"(this process)"` for a registration at run time.
        version: of that distribution.
        origin: `"first-party"`, `"third-party"` or `"registered"`.
    """

    platform: str
    implementation: Implementation
    distribution: str
    version: str
    origin: Literal["first-party", "third-party", "registered"]

    @property
    def id(self) -> str:
        variant = self.implementation.variant
        return f"{self.platform}.{variant}" if variant else self.platform
