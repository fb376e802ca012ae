"""`ejkernel list`: operations, who implements them, and in which state they are."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ejkernel.cli.completion import FormerOperation, OneOperation, complete_platform
from ejkernel.cli.output import AsJson, console, emit, say, table, user_mistakes, verdict


def list_operations(
    operation: OneOperation = None,
    former: FormerOperation = None,
    platform: Annotated[str | None, typer.Option(help="Only this platform.", autocompletion=complete_platform)] = None,
    as_json: AsJson = False,
) -> None:
    """List operations and their implementations."""
    operation = operation or former
    with user_mistakes():
        report = _collect(operation, platform)
    if as_json:
        emit(report)
        return
    screen = console()
    if operation is not None:
        rows = _lines(report["operations"][0]["implementations"] if report["operations"] else [])
        columns = ("implementation", "phases", "backends", "from", "state")
        screen.print(table(columns, rows, title=operation, wrap=("phases", "from")))
    else:
        rows = [(entry["operation"], _summary(entry["implementations"])) for entry in report["operations"]]
        screen.print(table(("operation", "implementations"), rows))
        say(screen, "(forward): has no backward kernel; (opt-in): runs only where platform= asks for it")
        say(screen, "more of one: ejkernel list OPERATION")
    for record in report["unusable_plugins"]:
        say(screen, f"{record['name']} ({record['distribution']}): {record['state']}: {record['reason']}")


def _summary(found: list[dict[str, Any]]) -> Any:
    """The implementations of an operation in one cell."""
    from rich.text import Text

    names = []
    for name, phases, _, _, state in _lines(found):
        remarks = [phases] if phases in ("forward", "backward") else []
        remarks += [state.plain] if state.plain not in ("ok", "none") else []
        # Hard spaces: a name and what is remarked on it stay on one line.
        names.append(name + (f"\N{NO-BREAK SPACE}({', '.join(remarks)})" if remarks else ""))
    return Text(", ".join(names))


def _lines(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """One line per implementation, its phases together."""
    phases: dict[tuple[Any, ...], list[str]] = {}
    for row in found:
        origin = f"{row['distribution']} {row['version']}".strip()
        key = (row["implementation"], "/".join(row["backends"]), origin, row["state"])
        phases.setdefault(key, []).append(row["phase"])
    return [
        (name, ", ".join(sorted(known, reverse=True)), backends, origin, verdict(state))
        for (name, backends, origin, state), known in sorted(phases.items())
    ] or [("-", "", "", "", verdict("none"))]


def _collect(operation: str | None, platform: str | None) -> dict[str, Any]:
    from ejkernel._plugins import catalog
    from ejkernel._plugins.registry import kernel_registry
    from ejkernel.errors import invalid, suggestion

    known = kernel_registry.list_operations()
    if operation is not None and operation not in known:
        raise invalid("operation", repr(operation), f"one of {', '.join(known)}" + suggestion(operation, known))
    if platform is not None:
        kernel_registry.check_platform("--platform", platform)
    operations = []
    for name in [operation] if operation else known:
        found = [
            _row(candidate)
            for candidate in kernel_registry.list_implementations(name)
            if platform in (None, candidate.platform, candidate.id)
        ]
        if found or platform is None:
            operations.append({"operation": name, "implementations": found})
    found = (*kernel_registry.records, *catalog.packs())
    unusable = [record.to_dict() for record in found if not record.ok and platform in (None, record.name)]
    return {"operations": operations, "unusable_plugins": unusable}


def _row(candidate: Any) -> dict[str, Any]:
    from ejkernel._plugins.catalog import is_stranger

    implementation = candidate.implementation
    return {
        "implementation": candidate.id,
        "phase": implementation.phase,
        "backends": list(implementation.backends),
        "distribution": candidate.distribution,
        "version": candidate.version,
        "origin": candidate.origin,
        "state": "opt-in" if is_stranger(candidate) else "ok",
    }
