"""The typer application: commands, and how mistakes end it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ejkernel._version import __version__
from ejkernel.cli._commands import Commands, Preparation
from ejkernel.cli.cache import cache_app
from ejkernel.cli.doctor import doctor
from ejkernel.cli.explain import explain
from ejkernel.cli.list import list_operations
from ejkernel.cli.output import UserError
from ejkernel.cli.tune import tune

app = typer.Typer(
    name="ejkernel",
    cls=Commands,
    help="JAX kernels: what is installed, what runs, and why.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("doctor")(doctor)
app.command("list")(list_operations)
app.command("explain")(explain)
app.command("tune")(tune)
app.add_typer(cache_app, name="cache")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        print(__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: Sequence[str], *, discovered: bool) -> int:
    """Run one command line; a user's mistake becomes one line on stderr and status 2."""
    command = typer.main.get_command(app)
    try:
        status = command.main(args=list(arguments), prog_name="ejkernel", standalone_mode=False, obj=Preparation(discovered))
    except (UserError, *_USAGE_ERRORS) as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)  # pyright: ignore
        print(f"ejkernel: {' '.join(message.split())}", file=sys.stderr)
        return 2
    except (typer.Abort, KeyboardInterrupt):
        print("ejkernel: interrupted", file=sys.stderr)
        return 130
    return status if isinstance(status, int) else 0


# The base of usage errors lives in click or inside typer, depending on typer's version.
_USAGE_ERRORS: tuple[type[Exception], ...] = tuple(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)
