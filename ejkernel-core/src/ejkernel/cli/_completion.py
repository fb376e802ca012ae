"""What a shell completes: names that are known without importing JAX or a plugin."""

from __future__ import annotations

from typing import Annotated

import typer

from ejkernel._plugins import catalog
from ejkernel._plugins.catalog import FUNCTIONS, OPERATIONS
from ejkernel._plugins.claims import claims_of
from ejkernel._plugins.records import PluginRecord
from ejkernel.operations._plugin import ejkernel_operations
from ejkernel.plugin import ENTRY_POINT_GROUP, OPERATIONS_GROUP


def _know_own_operations() -> None:
    """Those of other packs would cost their imports; here discovery has not run."""
    if not catalog.packs():
        pack = ejkernel_operations()
        names = catalog.operations_in(pack.operations)
        catalog.load([PluginRecord("core", "ejkernel-core", "", "", "ok", group=OPERATIONS_GROUP, pack=pack, operations=names)])


def complete_operation(incomplete: str) -> list[str]:
    """Operations that begin so."""
    _know_own_operations()
    return sorted(name for name in OPERATIONS if name.startswith(incomplete))


def complete_function(incomplete: str) -> list[str]:
    """Operations and public functions that begin so."""
    _know_own_operations()
    return sorted(name for name in {*OPERATIONS, *FUNCTIONS} if name.startswith(incomplete))


def complete_platform(incomplete: str) -> list[str]:
    """Platforms of installed plugins that begin so."""
    return sorted({claim.name for claim in claims_of(ENTRY_POINT_GROUP) if claim.name.startswith(incomplete)})


OneOperation = Annotated[str | None, typer.Argument(help="Only this operation.", autocompletion=complete_operation)]
FormerOperation = Annotated[str | None, typer.Option("--operation", hidden=True)]
"""The former spelling of `OneOperation`."""
