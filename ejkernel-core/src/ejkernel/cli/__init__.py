"""The command line: `ejkernel doctor | list | explain | demo | tune | bench | cache`."""

from __future__ import annotations

from ejkernel.cli._entry import main

__all__ = ["main"]
