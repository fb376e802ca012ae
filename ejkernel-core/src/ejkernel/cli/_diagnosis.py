"""What `ejkernel doctor` examines: facts as plain data, and the problems among them."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import importlib_metadata
from packaging.utils import canonicalize_name

from ejkernel._dispatch.log import logged_topics
from ejkernel._plugins import catalog
from ejkernel._plugins.catalog import OPERATIONS
from ejkernel._plugins.records import PLUGIN_IMPORT_PATIENCE, PluginRecord
from ejkernel._plugins.registry import kernel_registry
from ejkernel._plugins.settings import read_settings, unknown_settings
from ejkernel._plugins.surroundings import Surroundings, restore_environment
from ejkernel.call.policy import environment_platforms, policy_for_call
from ejkernel.cli import _probes
from ejkernel.cli._commands import Command, load
from ejkernel.cli._foreign import OURS, foreign_distributions
from ejkernel.cli.output import first_line
from ejkernel.errors import suggestion
from ejkernel.plugin import FALLBACK, FIRST_PARTY
from ejkernel.utils.known_versions import TESTED_JAX, matching, untested_jax

_ALWAYS = (OURS, "jax", "jaxlib", "numpy")
_RELATED = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "triton", "jax-triton")


def diagnose(
    commands: Sequence[Command],
    timeout: float = _probes.TIMEOUT,
    begun: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Examine this installation and this machine.

    Args:
        commands: those that other distributions add; they are imported.
        timeout: seconds for each native probe.
        begun: called with what is known while the probes still run: all that is asked of no subprocess.

    Returns:
        The facts; under `"problems"` what is broken among what was installed or asked for, and that nothing can run, each with a
        remedy; `"ok"` says that there is none; under `"advice"` what would be faster here.
    """
    records = kernel_registry.records
    examined = {record.name: _probes.references(record.name) for record in records if record.ok}
    hooks = {r.name: _probes.diagnosis(r.value) for r in records if hasattr(r.module, "ejkernel_diagnose")}
    with ThreadPoolExecutor(max_workers=2) as pool:  # two subprocesses, of which only the first makes JAX start its devices
        machine = pool.submit(_probes.ask, [_probes.DEVICES, _probes.DISPATCH], timeout)
        plugins = pool.submit(_probes.ask, [*examined.values(), *hooks.values()], timeout)
        versions = installed_versions(records)
        report: dict[str, Any] = {
            "versions": versions,
            "known_combinations": known_combinations(versions),
            "tested_jax": [*TESTED_JAX],
            "plugins": [record.to_dict() for record in records],
            "packs": [record.to_dict() for record in catalog.packs()],
            "registered": registrations(),
            "commands": [_examined(command).to_dict() for command in commands],
            "settings": [setting.to_dict() for setting in read_settings()],
            "unknown_settings": unknown_settings(),
            "foreign_distributions": foreign_distributions(),
            "cache": cache_state(),
            "unknown_operations": unknown_operations(),
        }
        begun(report)
    devices, dispatch = machine.result()
    report["devices"] = {"devices": devices.told, "error": devices.error}
    report["dispatch"] = {"operations": dispatch.told, "error": dispatch.error}
    findings = [{"findings": answer.told, "error": answer.error} for answer in plugins.result()]
    report["references"] = dict(zip(examined, findings[: len(examined)], strict=True))
    report["diagnoses"] = dict(zip(hooks, findings[len(examined) :], strict=True))
    untested = untested_jax(versions["jax"] or "0")
    report["advice"] = [*([untested] if untested else []), *missing_plugins(report)]
    report["problems"] = [problem for find in _PROBLEMS for problem in find(report)]
    report["ok"] = not report["problems"]
    return report


def installed_versions(records: tuple[PluginRecord, ...]) -> dict[str, str | None]:
    """Python, what we stand on, the plugins' distributions and whatever a plugin says it needs; None where it is missing."""
    needed = {canonicalize_name(name) for record in records if record.plugin for name in record.plugin.versions}
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in dict.fromkeys((*_ALWAYS, *(record.distribution for record in records), *_RELATED, *sorted(needed))):
        try:
            versions[name] = importlib_metadata.version(name)
        except importlib_metadata.PackageNotFoundError:
            if name in _ALWAYS or name in needed:
                versions[name] = None
    return versions


def registrations() -> list[dict[str, str]]:
    """What was registered at run time, with the code. Only a user's program does so, and there is none here."""
    return [
        {
            "implementation": candidate.id,
            "operation": candidate.implementation.operation,
            "phase": candidate.implementation.phase,
            "code": _name_of(candidate.implementation.target),
        }
        for candidate in kernel_registry.list_implementations()
        if candidate.origin == "registered"
    ]


def _name_of(code: Any) -> str:
    name = getattr(code, "__qualname__", type(code).__qualname__)
    return f"{getattr(code, '__module__', '?')}.{name}"


def _examined(command: Command) -> Command:
    """A command after its import, which was not asked for: what that changed is put back."""
    before, environment = Surroundings("everything"), dict(os.environ)
    try:
        return load(command)[0]
    finally:
        before.restore()
        restore_environment(environment)


def unknown_operations() -> list[dict[str, str]]:
    """Operations that plugins implement and core does not have, so that nothing calls them."""
    wrong = dict.fromkeys(
        (candidate.implementation.operation, candidate.platform, candidate.distribution)
        for candidate in kernel_registry.list_implementations()
        if candidate.origin != "registered" and candidate.implementation.operation not in OPERATIONS
    )
    return [dict(zip(("operation", "plugin", "distribution"), one, strict=True)) for one in wrong]


def missing_plugins(report: dict[str, Any]) -> list[str]:
    """First-party plugins that are not installed and that the default order puts first on the device that is here."""
    found = {record.name for record in kernel_registry.records}
    wanted: dict[str, list[str]] = {}
    for one in report["dispatch"]["operations"]:
        for name in one["faster"]:
            if name in FIRST_PARTY and name not in found:
                wanted.setdefault(name, []).append(one["operation"])
    backend = next((one["backend"] for one in report["dispatch"]["operations"]), "")
    return [
        f"pip install {FIRST_PARTY[name]}: on this {backend} it is faster for {', '.join(operations)}"
        for name, operations in sorted(wanted.items())
    ]


def known_combinations(versions: dict[str, str | None]) -> list[dict[str, Any]]:
    """Measured combinations that these versions amount to."""
    found = matching({name: version for name, version in versions.items() if version})
    return [{"packages": dict(c.packages), "verdict": c.verdict, "finding": c.finding, "remedy": c.remedy} for c in found]


def cache_state() -> dict[str, Any]:
    """The tuning cache's folder and entries."""
    from ejkernel.cli.cache import describe_cache

    return describe_cache()


def _plugin_problems(report: dict[str, Any]) -> list[dict[str, str]]:
    return [
        _problem(f"{kind} {p['name']} ({p['distribution']} {p['version']}) is {p['state']}: {p['reason']}", _plugin_remedy(p))
        for kind, found in (("plugin", report["plugins"]), ("pack of operations", report["packs"]))
        for p in found
        if p["state"] not in ("ok", "disabled")
    ]


def _plugin_remedy(plugin: dict[str, Any]) -> str:
    distribution = plugin["distribution"]
    return {
        "missing requirement": f"install what is missing, or pip uninstall {distribution}",
        "incompatible": f"pip install --upgrade {distribution} {OURS}",
        "conflict": "uninstall all but one of the distributions that claim the same name",
    }.get(plugin["state"], f"see `ejkernel doctor --verbose`; pip install --force-reinstall {distribution}")


def _reference_problems(report: dict[str, Any]) -> list[dict[str, str]]:
    """Code that a plugin names and that cannot be imported; once for each reference, whatever the phases that share it."""
    problems: dict[str, dict[str, str]] = {}
    for p in report["plugins"]:
        answer = report["references"].get(p["name"], {"findings": [], "error": None})
        who, remedy = f"plugin {p['name']} ({p['distribution']} {p['version']})", _plugin_remedy(p)
        for found in answer["findings"]:
            where = f"{found['field']} {found['reference']!r} of {found['operation']} ({found['phase']})"
            what = f"{who}: {where} cannot be imported: {found['error']}"
            problems.setdefault(f"{p['name']} {found['reference']}", _problem(what, remedy))
        if answer["error"]:
            problems[p["name"]] = _problem(f"{who}: importing what it names failed: {answer['error']}", remedy)
    return [*problems.values()]


def _operation_problems(report: dict[str, Any]) -> list[dict[str, str]]:
    return [
        _problem(
            f"plugin {one['plugin']} ({one['distribution']}) implements {one['operation']!r}, which is no operation"
            + suggestion(one["operation"], OPERATIONS),
            f"report it to the authors of {one['distribution']}",
        )
        for one in report["unknown_operations"]
    ]


def _dispatch_problems(report: dict[str, Any]) -> list[dict[str, str]]:
    """That nothing can run, where the devices answer at all."""
    answer = report["dispatch"]
    if report["devices"]["error"] or any(one["chosen"] for one in answer["operations"]):
        return []
    reason = answer["error"] or next((one["error"] for one in answer["operations"] if one["error"]), None)
    what = "no operation can run here" + (f": {reason}" if reason else ": no usable plugin serves this device")
    return [_problem(what, f"pip install {FIRST_PARTY[FALLBACK]}, which runs everywhere, or correct what is named above")]


def _registration_problems(report: dict[str, Any]) -> list[dict[str, str]]:
    return [
        _problem(
            f"{r['implementation']} of {r['operation']} ({r['phase']}) was registered at run time by {r['code']}, in every program",
            "find what imports that module when Python starts: a .pth file, sitecustomize or usercustomize",
        )
        for r in report["registered"]
    ]


def _slow_problems(report: dict[str, Any]) -> list[dict[str, str]]:
    return [
        _problem(f"plugin {p['name']} takes {p['seconds']:.1f} s to import", f"report it to the authors of {p['distribution']}")
        for p in report["plugins"]
        if p["state"] == "ok" and p["seconds"] > PLUGIN_IMPORT_PATIENCE
    ]


def _command_problems(report: dict[str, Any]) -> list[dict[str, str]]:
    problems = []
    for c in report["commands"]:
        if c["state"] != "ok":
            what = f"command {c['name']} ({c['distribution']} {c['version']}) is {c['state']}: {c['reason']}"
            problems.append(_problem(what, f"pip install --upgrade {c['distribution']}, or pip uninstall {c['distribution']}"))
    return problems


def _setting_problems(report: dict[str, Any]) -> list[dict[str, str]]:
    problems = [
        _problem(f"{name} is set, and nothing reads it", hint or "unset it; `ejkernel doctor --verbose` lists the settings")
        for name, hint in report["unknown_settings"].items()
    ]
    found = {plugin["name"] for plugin in report["plugins"]}
    allowed = next(s["value"] for s in report["settings"] if s["name"] == "EJKERNEL_PLUGINS")
    problems += [
        _problem(f"EJKERNEL_PLUGINS names {name!r}, which is not installed" + suggestion(name, found), "correct the variable")
        for name in (part.strip().lower() for part in (allowed or "").split(","))
        if name and name not in found
    ]
    try:
        logged_topics()
        policy_for_call("*", None)
    except (ValueError, TypeError) as error:
        problems.append(_problem(first_line(error), "correct or unset the variable"))
        return problems
    usable = {plugin["name"] for plugin in report["plugins"] if plugin["state"] == "ok"} | {*kernel_registry.list_platforms()}
    for operation in ("*", *kernel_registry.list_operations()):
        unusable = [name for name in environment_platforms(operation) if name.partition(".")[0] not in usable]
        if unusable:
            what = f"EJKERNEL_PLATFORM asks for {', '.join(unusable)}, which cannot be used here"
            problems.append(_problem(what, "see the plugin's state above"))
            break
    return problems


def _version_problems(report: dict[str, Any]) -> list[dict[str, str]]:
    problems = []
    for found in report["known_combinations"]:
        if found["verdict"] == "bad":
            names = " with ".join(f"{name} {report['versions'][name]}" for name in found["packages"])
            problems.append(_problem(f"{names}: {found['finding']}", found["remedy"]))
    return problems


def _foreign_problems(report: dict[str, Any]) -> list[dict[str, str]]:
    return [
        _problem(
            f"{found['distribution']} {found['version']} also owns the import package ejkernel; files of both are mixed",
            f"pip uninstall {found['distribution']} && pip install --force-reinstall --no-deps {OURS}",
        )
        for found in report["foreign_distributions"]
    ]


def _device_problems(report: dict[str, Any]) -> list[dict[str, str]]:
    error = report["devices"]["error"]
    problems = [_problem(f"jax.devices(): {error}", "check JAX_PLATFORMS, the driver and jax's installation")] if error else []
    for name, answer in report["diagnoses"].items():
        if answer["error"]:
            problems.append(
                _problem(f"plugin {name}: its own examination failed: {answer['error']}", "report it to its authors")
            )
    return problems


def _cache_problems(report: dict[str, Any]) -> list[dict[str, str]]:
    """A cache folder that cannot be used is a problem where the user chose it; elsewhere it is only shown. What others can write to
    is a problem anywhere."""
    cache, problems = report["cache"], []
    chosen = any(s["name"] == "EJKERNEL_CACHE_DIR" and s["value"] for s in report["settings"])
    if cache["error"] and chosen:
        problems.append(_problem(f"tuning cache: {cache['error']}", "set EJKERNEL_CACHE_DIR to a folder that can be written"))
    for complaint in cache["distrusted"]:
        what, _, remedy = complaint.partition("; ")
        problems.append(_problem(f"cache: {what}", remedy))
    if unreadable := cache["states"].get("unreadable", 0):
        problems.append(_problem(f"tuning cache: {unreadable} unreadable entries", "ejkernel cache clear"))
    return problems


def _problem(what: str, remedy: str) -> dict[str, str]:
    return {"problem": what, "remedy": remedy}


_PROBLEMS: tuple[Callable[[dict[str, Any]], list[dict[str, str]]], ...] = (
    _foreign_problems,
    _plugin_problems,
    _reference_problems,
    _operation_problems,
    _registration_problems,
    _slow_problems,
    _command_problems,
    _setting_problems,
    _version_problems,
    _device_problems,
    _dispatch_problems,
    _cache_problems,
)
