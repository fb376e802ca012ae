"""`ejkernel list`: operations, who implements them, and in which state they are."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ejkernel.cli.output import AsJson, console, emit, table, user_mistakes, verdict


def list_operations(
    operation: Annotated[str | None, typer.Option(help="Only this operation.")] = None,
    platform: Annotated[str | None, typer.Option(help="Only this platform.")] = None,
    as_json: AsJson = False,
) -> None:
    """List operations and their implementations."""
    with user_mistakes():
        report = _collect(operation, platform)
    if as_json:
        emit(report)
        return
    rows = []
    for entry in report["operations"]:
        lines = _lines(entry["implementations"])
        rows += [(entry["operation"] if index == 0 else "", *line) for index, line in enumerate(lines)]
    screen = console()
    screen.print(table(("operation", "implementation", "phases", "backends", "from", "state"), rows, wrap=("phases", "from")))
    for record in report["unusable_plugins"]:
        screen.print(f"{record['name']} ({record['distribution']}): {record['state']}: {record['reason']}", markup=False)


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
    from ejkernel._plugins.registry import kernel_registry
    from ejkernel.errors import invalid, suggestion

    known = kernel_registry.list_operations()
    if operation is not None and operation not in known:
        raise invalid("--operation", repr(operation), f"one of {', '.join(known)}" + suggestion(operation, known))
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
    unusable = [record.to_dict() for record in kernel_registry.records if not record.ok and platform in (None, record.name)]
    return {"operations": operations, "unusable_plugins": unusable}


def _row(candidate: Any) -> dict[str, Any]:
    implementation = candidate.implementation
    return {
        "implementation": candidate.id,
        "phase": implementation.phase,
        "backends": list(implementation.backends),
        "distribution": candidate.distribution,
        "version": candidate.version,
        "origin": candidate.origin,
        "state": "opt-in" if candidate.origin == "third-party" else "ok",
    }
