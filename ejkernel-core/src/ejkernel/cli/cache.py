"""`ejkernel cache`: look at and empty the user's cache; export and merge its tuned configs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

import typer

from ejkernel.cli.completion import FormerOperation, OneOperation
from ejkernel.cli.output import AsJson, UserError, console, emit, say, table, user_mistakes, verdict

cache_app = typer.Typer(help="Look after the cache of tuned configs and compiled kernels.", no_args_is_help=False)


@cache_app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@cache_app.command("show")
def show(operation: OneOperation = None, as_json: AsJson = False) -> None:
    """Show where the cache is and what it holds."""
    from ejkernel.tuning import cache_entries
    from ejkernel.utils.kernel_store import bundled_kernels, bundles, stored_kernels

    state = describe_cache()
    files = [file for file in cache_entries() if operation in (None, file.key and file.key.operation)]
    kernels = stored_kernels()
    found = {str(folder): len(bundled_kernels(folder)) for folder in bundles()}
    if as_json:
        emit({**state, "files": [file.to_dict() for file in files], "kernels": dataclasses.asdict(kernels), "bundles": found})
        return
    screen = console()
    calls: dict[str, list[tuple[Any, ...]]] = {}
    for file in files:
        title = f"{file.key.operation} {file.key.phase}: {file.key.arrays()}" if file.key else "cannot be read"
        calls.setdefault(title, []).append(_row(file))
    for title, rows in calls.items():
        say(screen, title, style="bold")
        screen.print(table(("implementation", "device", "state", "config"), rows, wrap=("device", "config")))
        screen.print()
    counts = f"{state['entries']} entries ({state['quarantined']} quarantined), {state['bytes']} bytes"
    say(screen, f"{state['directory']}: {counts}")
    say(screen, f"compiled kernels: {kernels.count}, {kernels.bytes} bytes")
    for folder, count in found.items():
        say(screen, f"bundle {folder}: {count} compiled kernels")
    for complaint in filter(None, (state["error"], *state["distrusted"])):
        say(screen, complaint, style="yellow")


@cache_app.command("clear")
def clear(
    operation: OneOperation = None,
    former: FormerOperation = None,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="Only quarantined configs, to try them again.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete entries; without an operation also compiled kernels."""
    from ejkernel.tuning import clear_cache
    from ejkernel.utils.kernel_store import clear_kernels

    operation = operation or former
    kept = f" of {operation}" if operation else "" if quarantine else " and the compiled kernels"
    what = ("the quarantined configs" if quarantine else "the entries") + kept
    if not yes:
        if as_json:
            raise UserError("--json: needs --yes as well, since nothing can be asked")
        if not sys.stdin.isatty():
            raise UserError("cache clear: nothing can be asked without a terminal; pass --yes to delete all the same")
        typer.confirm(f"Delete {what} in {describe_cache()['directory']}?", abort=True)
    count = clear_cache(operation, quarantine=quarantine or None)
    kernels = 0 if operation or quarantine else clear_kernels()
    if as_json:
        emit({"deleted": count, "kernels": kernels})
        return
    _say(as_json, "deleted", count)
    if kernels:
        print(f"deleted {kernels} compiled {'kernel' if kernels == 1 else 'kernels'}")


@cache_app.command("export")
def export(
    path: Annotated[Path, typer.Argument(help="The file to write.")],
    operation: OneOperation = None,
    former: FormerOperation = None,
    as_json: AsJson = False,
) -> None:
    """Write the entries to a JSON file that a plugin can ship."""
    from ejkernel.tuning import export_cache

    with _file_mistakes(path):
        count = export_cache(path, operation or former)
    _say(as_json, "exported", count)


@cache_app.command("merge")
def merge(
    path: Annotated[Path, typer.Argument(help="An exported file.")],
    replace: Annotated[bool, typer.Option(help="Also where the cache has an entry already.")] = False,
    as_json: AsJson = False,
) -> None:
    """Take the entries of an exported file into the cache."""
    from ejkernel.tuning import merge_cache

    with _file_mistakes(path):
        count = merge_cache(path, replace=replace)
    _say(as_json, "merged", count)


def describe_cache() -> dict[str, Any]:
    """The cache's folder, its size, whether it can be used, and what in it is not, as others can write to it; writes nothing."""
    from ejkernel.tuning import cache_info
    from ejkernel.utils.cache_folder import all_distrusted

    info = cache_info()
    return {
        "directory": str(info.directory),
        "entries": info.count,
        "bytes": info.bytes,
        "states": dict(info.states),
        "quarantined": info.quarantined,
        "error": _obstacle(info.directory),
        "distrusted": [str(one) for one in all_distrusted()],
    }


def _obstacle(directory: Path) -> str | None:
    """Why entries cannot be written there, as far as can be told without writing."""
    existing = next((path for path in (directory, *directory.parents) if path.exists()), directory)
    if not existing.is_dir():
        return f"{existing} is not a folder"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} cannot be written"


def _row(file: Any) -> tuple[Any, ...]:
    if file.key is None:
        return (file.path.name, "", verdict(file.state), file.reason)
    key, held = file.key, file.entry or file.quarantined
    config = ", ".join(f"{name}={value}" for name, value in (held.config or {}).items())
    state = verdict(file.state)
    if file.quarantined is not None:
        config, state = f"{config}: {file.quarantined.reason}", verdict("quarantined" if file.state == "ok" else file.state)
    return (key.implementation, key.device_kind or key.backend, state, config)


@contextlib.contextmanager
def _file_mistakes(path: Path) -> Generator[None]:
    """As `user_mistakes`, also for files that cannot be read or written."""
    with user_mistakes():
        try:
            yield
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from error


def _say(as_json: bool, word: str, count: int) -> None:
    if as_json:
        emit({word: count})
    else:
        print(f"{word} {count} {'entry' if count == 1 else 'entries'}")
