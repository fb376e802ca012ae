"""The command line: `ejkernel doctor | list | explain | tune | cache`, and what other distributions add.

A distribution adds a command with an entry point in the group `ejkernel.commands`: its name is the command's, its value
`module:function`, a function as typer takes it, or `module:app`, a `typer.Typer`.
"""

from __future__ import annotations

from ejkernel.cli._entry import main

__all__ = ["main"]
