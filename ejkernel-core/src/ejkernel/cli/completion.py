"""What a shell completes: names that are known without importing JAX or a plugin."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Annotated

import typer

from ejkernel._plugins import catalog
from ejkernel._plugins.catalog import FUNCTIONS, OPERATIONS
from ejkernel._plugins.claims import claims_of
from ejkernel.plugin import ENTRY_POINT_GROUP, OPERATIONS_GROUP, OperationPack


def _know_own_operations() -> None:
    """Those of other packs would cost their imports; here discovery has not run."""
    ours = [] if catalog.packs() else [claim for claim in claims_of(OPERATIONS_GROUP) if claim.first_party]
    for claim in ours[:1]:
        pack: OperationPack = importlib.import_module(claim.value).ejkernel_operations()
        catalog.load([dataclasses.replace(claim, pack=pack, operations=catalog.operations_in(pack.operations))])


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
