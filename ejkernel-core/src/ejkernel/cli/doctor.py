"""`ejkernel doctor`: versions, plugins, settings, devices and what is wrong with them."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, Any

import typer

from ejkernel.cli.output import AsJson, console, emit, own_output, say, table, verdict


def doctor(
    context: typer.Context,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks, and what every setting means.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for each native probe.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Examine the installation; status 0 only where something can run.

    Status 1 if nothing can, or if something that was installed or asked for is broken.
    """
    from ejkernel.cli._diagnosis import diagnose

    root: Any = context.find_root().command
    answers = sys.stdout

    def begun(report: dict[str, Any]) -> None:
        """Shown while the probes run."""
        if not as_json:
            with contextlib.redirect_stdout(answers):
                _render_installed(report, verbose)

    with own_output():
        report = diagnose(root.others, timeout, begun)
    if as_json:
        emit(report)
    else:
        _render_found(report)
    raise typer.Exit(0 if report["ok"] else 1)


def _section(screen: Any, title: str, columns: tuple[str, ...], rows: list[Any]) -> None:
    screen.print(table(columns, rows, title=title))
    screen.print()


def _render_installed(report: dict[str, Any], verbose: bool) -> None:
    screen = console()
    versions = [(name, version or "not installed") for name, version in report["versions"].items()]
    _section(screen, "Versions", ("package", "version"), versions)
    say(screen, "ejkernel is tested with jax {} to {}".format(*report["tested_jax"]))
    for found in report["known_combinations"]:
        names = ", ".join(f"{name} {report['versions'][name]}" for name in found["packages"])
        screen.print(verdict(found["verdict"]), f"combination {names}: {found['finding']}", markup=False)
    screen.print()
    plugins = [
        (p["name"], verdict(p["state"]), f"{p['distribution']} {p['version']}", p["reason"] or _remark(p))
        for p in report["plugins"]
    ]
    _section(screen, "Plugins", ("plugin", "state", "from", "remarks"), plugins)
    packs = [
        (
            p["name"],
            verdict(p["state"]),
            f"{p['distribution']} {p['version']}",
            p["reason"] or f"{len(p['operations'])} operations",
        )
        for p in report["packs"]
    ]
    _section(screen, "Packs of operations", ("pack", "state", "from", "remarks"), packs)
    if report["registered"]:
        registered = [(r["implementation"], f"{r['operation']} {r['phase']}", r["code"]) for r in report["registered"]]
        _section(screen, "Registered at run time", ("implementation", "of", "code"), registered)
    if report["commands"]:
        commands = [
            (c["name"], verdict(c["state"]), f"{c['distribution']} {c['version']}", c["reason"]) for c in report["commands"]
        ]
        _section(screen, "Commands of other distributions", ("command", "state", "from", "reason"), commands)
    if verbose:
        _print_tracebacks(screen, [*report["plugins"], *report["packs"], *report["commands"]])
    settings = [(s["name"], _shown(s), s["source"], *([s["meaning"]] if verbose else [])) for s in report["settings"]]
    columns = ("setting", "value", "source", "meaning") if verbose else ("setting", "value", "source")
    screen.print(table(columns, settings, title="Settings", wrap=("value", "meaning")))
    screen.print()


def _render_found(report: dict[str, Any]) -> None:
    screen = console()
    _section(screen, "Devices", ("device", "kind", "capability"), _device_rows(report["devices"]["devices"]))
    _section(screen, "What runs here", ("implementation", "operations"), _served(report["dispatch"]))
    findings = [
        (name, finding["name"], finding["finding"])
        for name, answer in report["diagnoses"].items()
        for finding in answer["findings"]
    ]
    if findings:
        _section(screen, "What plugins found", ("plugin", "examined", "finding"), findings)
    cache = report["cache"]
    state = cache["error"] or f"{cache['entries']} entries"
    say(screen, f"Tuning cache: {cache['directory']}: {state}")
    for advice in report["advice"]:
        say(screen, f"advice: {advice}", style="yellow")
    _print_verdict(screen, report["problems"])


def _remark(plugin: dict[str, Any]) -> str:
    """How a plugin that can be used delays every program."""
    if not plugin["slow"]:
        return ""
    heavy = f" and imports {', '.join(plugin['heavy'])}" if plugin["heavy"] else ""
    return f"its plugin module takes {1e3 * plugin['seconds']:.0f} ms to import{heavy}"


def _shown(setting: dict[str, Any]) -> str:
    if setting["value"] is None:
        return setting["default"]
    return setting["value"] or "(empty)"


def _served(dispatch: dict[str, Any]) -> list[tuple[str, str]]:
    """Which operations each implementation would run, in their usual case."""
    served: dict[str, list[str]] = {}
    for one in dispatch["operations"]:
        served.setdefault(one["chosen"] or "(nothing)", []).append(one["operation"])
    return [(name, ", ".join(operations)) for name, operations in sorted(served.items())]


def _device_rows(devices: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [(f"{d['platform']}:{d['id']}", d["kind"], str(d["compute_capability"] or "")) for d in devices]


def _print_tracebacks(screen: Any, records: list[dict[str, Any]]) -> None:
    for record in records:
        if record["traceback"]:
            screen.print(f"{record['name']}:", style="bold", markup=False)
            screen.print(record["traceback"], markup=False, soft_wrap=True)


def _print_verdict(screen: Any, problems: list[dict[str, str]]) -> None:
    if not problems:
        screen.print("Healthy.", style="green")
        return
    screen.print(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}:", style="bold red")
    for problem in problems:
        say(screen, f"  - {problem['problem']}")
        say(screen, f"    remedy: {problem['remedy']}")
