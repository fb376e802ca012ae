"""What a shell completes: names that are known without importing JAX or a plugin."""

from __future__ import annotations

from typing import Annotated

import typer

from ejkernel._plugins.catalog import FUNCTIONS, OPERATIONS
from ejkernel._plugins.claims import claims_of
from ejkernel.plugin import ENTRY_POINT_GROUP


def complete_operation(incomplete: str) -> list[str]:
    """Operations that begin so."""
    return sorted(name for name in OPERATIONS if name.startswith(incomplete))


def complete_function(incomplete: str) -> list[str]:
    """Operations and public functions that begin so."""
    return sorted(name for name in {*OPERATIONS, *FUNCTIONS} if name.startswith(incomplete))


def complete_platform(incomplete: str) -> list[str]:
    """Platforms of installed plugins that begin so."""
    return sorted({claim.name for claim in claims_of(ENTRY_POINT_GROUP) if claim.name.startswith(incomplete)})


OneOperation = Annotated[str | None, typer.Argument(help="Only this operation.", autocompletion=complete_operation)]
FormerOperation = Annotated[str | None, typer.Option("--operation", hidden=True)]
"""The former spelling of `OneOperation`."""
