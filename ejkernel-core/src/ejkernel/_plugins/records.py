"""What became of each plugin that was found, and where each implementation comes from."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from ejkernel._plugins.requirements import canonical
from ejkernel.plugin import FIRST_PARTY, Implementation, Plugin, Quarantine

PLUGIN_IMPORT_BUDGET = 0.005
"""Seconds that importing a plugin's plugin module may take; `ejkernel doctor` remarks on those that take more."""

PLUGIN_IMPORT_PATIENCE = 1.0
"""Seconds from which on every program is warned."""

State = Literal["ok", "disabled", "missing requirement", "incompatible", "conflict", "broken"]


@dataclasses.dataclass(frozen=True)
class PluginRecord:
    """One entry point and its state.

    Attributes:
        name: platform id, the entry point's name.
        distribution: the distribution that ships it.
        version: that distribution's version.
        value: the module that the entry point names.
        state: what became of it.
        reason: why it is not `ok`, in the user's words.
        traceback: of the exception that broke it, if any.
        plugin: its description when one could be had.
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
    plugin: Plugin | None = None
    tables: tuple[str, ...] = ()
    quarantine: tuple[Quarantine, ...] = ()
    module: Any = None
    seconds: float = 0.0
    heavy: tuple[str, ...] = ()

    @property
    def slow(self) -> bool:
        """Whether its plugin module is none: slow to import, or importing other packages."""
        return self.seconds > PLUGIN_IMPORT_BUDGET or bool(self.heavy)

    @property
    def ok(self) -> bool:
        return self.state == "ok"

    @property
    def first_party(self) -> bool:
        return FIRST_PARTY.get(self.name) == canonical(self.distribution)

    def to_dict(self) -> dict[str, Any]:
        fields = ("name", "distribution", "version", "value", "state", "reason", "traceback", "seconds", "slow")
        lists = {"tables": [*self.tables], "heavy": [*self.heavy]}
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
