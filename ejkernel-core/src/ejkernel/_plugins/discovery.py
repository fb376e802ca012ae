"""Entry points of platforms and of packs of operations -> `PluginRecord`, one isolated step for each.

The loop is our own: pluggy's entry-point loader stops at the first plugin that raises and loads shadowed distributions. pluggy
validates hooks and calls them, with one manager per plugin so that none can disturb another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import importlib_metadata
import pluggy

from ejkernel._plugins import catalog as _catalog, requirements as _requirements, validation as _validation
from ejkernel._plugins.catalog import OPERATIONS
from ejkernel._plugins.claims import claims_of, ended, entry_points_files
from ejkernel._plugins.containment import contained, know_packages, raised
from ejkernel._plugins.records import OWNERS, PLUGIN_IMPORT_PATIENCE, PluginRecord, State
from ejkernel._plugins.settings import is_on
from ejkernel._plugins.surroundings import restore_environment
from ejkernel.errors import PluginError, PluginWarning, suggestion, warn
from ejkernel.plugin import ENTRY_POINT_GROUP, FIRST_PARTY, FIRST_PARTY_PACKS, OPERATIONS_GROUP, Hooks, Plugin

_VALUE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\s*:\s*[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)?")


class _RejectedError(Exception):
    """Ends the examination of one plugin, with the state it ends in."""

    def __init__(self, state: State, reason: str) -> None:
        super().__init__(reason)
        self.state: State = state
        self.reason = reason


def discover() -> tuple[PluginRecord, ...]:
    """Find every installed plugin and say what became of it.

    Each one that cannot be used gives one `PluginWarning`; those that `EJKERNEL_PLUGINS` leaves out give none.

    Raises:
        PluginError: under `EJKERNEL_STRICT=1`, if any plugin cannot be used.
    """
    records = examine_plugins()
    _complain(complaints(records))
    return records


def examine_plugins() -> tuple[PluginRecord, ...]:
    """As `discover`, without a word about plugins that cannot be used. The catalog takes over the packs of operations."""
    files, allowed = entry_points_files(), _allowed()
    claims, packs = ([*claims_of(group, files)] for group in (ENTRY_POINT_GROUP, OPERATIONS_GROUP))
    owners = {c.value.partition(".")[0].strip(): (c.distribution, not c.first_party) for c in (*packs, *claims) if c.value}
    know_packages({package: owner for package, owner in owners.items() if package != "ejkernel"})
    _catalog.load(_without_rivals([_examine(claim, packs, allowed, _pack_answers) for claim in packs]))
    return tuple(_examine(claim, claims, allowed, _checked_answers) for claim in claims)


def _without_rivals(packs: list[PluginRecord]) -> list[PluginRecord]:
    """A name belongs to one pack: one of ours to it, any other to nobody if two bring it."""
    if all(pack.first_party for pack in packs if pack.ok):
        return packs
    brought = {pack: _brought(pack) for pack in packs}
    return [pack if pack.first_party else _without_rival(pack, brought) for pack in packs]


def _without_rival(pack: PluginRecord, brought: Mapping[PluginRecord, set[str]]) -> PluginRecord:
    for rival, names in brought.items():
        if rival is not pack and (twice := sorted(brought[pack] & names)):
            what = f"{', '.join(map(repr, twice))}, which {rival.distribution} {rival.version} brings too"
            return ended(pack, "conflict", f"it brings {what}; rename it or pip uninstall {pack.distribution}")
    return pack


def _brought(pack: PluginRecord) -> set[str]:
    return {*pack.operations, *(_catalog.public_names(pack.pack) if pack.pack is not None else ())} if pack.ok else set()


def complaints(records: Iterable[PluginRecord]) -> list[str]:
    """What is wrong with the plugins and packs that were found or asked for, one sentence or two each."""
    records = [*_catalog.packs(), *records]
    messages = [_message(record) for record in records if record.state not in ("ok", "disabled")]
    messages += [_remark(record) for record in records if record.ok and record.seconds > PLUGIN_IMPORT_PATIENCE]
    messages += [message for record in records for message in _unknown_operations(record)]
    if not any(record.first_party for record in _catalog.packs()):
        messages.append(
            "ejkernel: its own operations are not among the entry points; pip install --force-reinstall ejkernel-core"
        )
    return [*messages, *_unknown(_allowed() or (), {record.name for record in records})]


def is_strict() -> bool:
    """Whether `EJKERNEL_STRICT` asks for errors in place of warnings."""
    return is_on("EJKERNEL_STRICT")


def _allowed() -> tuple[str, ...] | None:
    """The allow-list `EJKERNEL_PLUGINS`; None where it is not set."""
    text = os.environ.get("EJKERNEL_PLUGINS")
    return None if text is None else tuple(part.strip().lower() for part in text.split(",") if part.strip())


_Answers = Callable[[PluginRecord], PluginRecord]
"""Asks the hooks of a module and checks what they answer."""


def _examine(
    claim: PluginRecord, claims: Iterable[PluginRecord], allowed: tuple[str, ...] | None, answers: _Answers
) -> PluginRecord:
    own = claim.group == OPERATIONS_GROUP and claim.name in FIRST_PARTY_PACKS
    if allowed is not None and claim.name not in allowed and not own:
        return ended(claim, "disabled", "EJKERNEL_PLUGINS does not name it")
    if not claim.ok:
        return claim
    environment = dict(os.environ)
    try:
        _refuse_conflict(claim, claims)
        with _undisturbed():
            claim = _answered(_load(claim), answers)
        if claim.plugin is not None:
            _refuse_unmet(claim.plugin)
    except _RejectedError as rejected:
        restore_environment(environment)
        # `raise _RejectedError from error` keeps the plugin's own exception, whose traceback its author needs
        return ended(claim, rejected.state, rejected.reason, with_traceback=rejected.__cause__ is not None)
    return claim


@contextlib.contextmanager
def _undisturbed() -> Generator[None]:
    """Keep what a plugin prints off the standard output, which belongs to the program, and its changes to warnings to itself."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr or io.StringIO()):
        yield


def _refuse_conflict(claim: PluginRecord, claims: Iterable[PluginRecord]) -> None:
    """A name belongs to one distribution: a reserved one to its owner, any other to nobody if two claim it."""
    complaint = _validation.platform_name(claim.name)
    if complaint:
        raise _RejectedError("broken", complaint)
    owner = OWNERS[claim.group].get(claim.name)
    owned = owner is not None and _requirements.canonical(claim.distribution) == owner
    what = "platform name" if claim.group == ENTRY_POINT_GROUP else "name"
    if owner is not None and not owned:
        raise _RejectedError("conflict", f"the {what} {claim.name!r} belongs to {owner}; use another name")
    rivals = [other for other in claims if other.ok and other.name == claim.name and other is not claim]
    rivals = [other for other in rivals if not owned or other.distribution == claim.distribution]
    if rivals:
        if all(other.distribution == claim.distribution for other in rivals):
            raise _RejectedError("conflict", f"it claims the {what} {claim.name!r} more than once")
        others = ", ".join(f"{other.distribution} {other.version}" for other in rivals)
        uninstall = " or ".join(f"pip uninstall {name}" for name in (claim.distribution, *(o.distribution for o in rivals)))
        raise _RejectedError("conflict", f"{others} claims the {what} {claim.name!r} too; {uninstall}")


def _load(claim: PluginRecord) -> PluginRecord:
    """Import the plugin module, and keep how long that took and what it dragged in."""
    if not _VALUE.fullmatch(claim.value.strip()):
        raise _RejectedError("broken", f"its entry point names {claim.value!r}, expected a module such as 'acme._plugin'")
    entry = importlib_metadata.EntryPoint(claim.name, claim.value.strip(), claim.group)
    before = {*sys.modules}
    start = time.perf_counter()
    try:
        module = contained(claim.who, lambda: _second_copy(entry.load()), watch="everything")
    except Exception as error:
        raise _RejectedError("broken", _import_failure(entry.module, error)) from error
    seconds = time.perf_counter() - start
    own = entry.module.partition(".")[0]
    light = {*sys.stdlib_module_names, "ejkernel", "pluggy", own}
    heavy = {name.partition(".")[0] for name in {*sys.modules} - before} - light
    return dataclasses.replace(claim, module=module, seconds=seconds, heavy=tuple(sorted(heavy)))


def _second_copy(module: Any) -> Any:
    """The module, or a copy of its own where it is only half imported: its import is what imported ejkernel."""
    spec = getattr(module, "__spec__", None)
    if spec is None or not getattr(spec, "_initializing", False):
        return module
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def _import_failure(module: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return f"module {error.name!r}, which its entry point names, does not exist; reinstall or uninstall the distribution"
    return f"importing {module!r} raised {raised(error)}"


def _answered(claim: PluginRecord, answers: _Answers) -> PluginRecord:
    """Ask the module and check its answers, all of which can run its code."""
    try:
        return contained(claim.who, answers, claim, watch="everything")
    except _RejectedError:
        raise
    except Exception as error:
        raise _RejectedError("broken", f"what it answers raised {raised(error)}") from error


def _manager(claim: PluginRecord) -> pluggy.PluginManager:
    """pluggy's, with one module."""
    manager = pluggy.PluginManager("ejkernel")
    manager.add_hookspecs(Hooks)
    try:
        manager.register(claim.module, claim.name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise _RejectedError("broken", f"its hooks do not fit: {' '.join(str(error).split())}") from error
    return manager


def _description(claim: PluginRecord, manager: pluggy.PluginManager, hook: str) -> Any:
    answers = _ask(claim, manager, hook)
    if not answers:
        raise _RejectedError("broken", f"{claim.value!r} does not answer the hook {hook}; mark it with @hookimpl")
    return answers[0]


def _pack_answers(claim: PluginRecord) -> PluginRecord:
    pack = _description(claim, _manager(claim), "ejkernel_operations")
    _broken_if(_validation.pack(pack, claim.name))
    complaint = _validation.api_level(pack.api_level, claim.distribution)
    if complaint:
        raise _RejectedError("incompatible", complaint)
    try:
        operations = _catalog.operations_in(pack.operations)
        names = () if claim.first_party else _catalog.public_names(pack)  # reads every facade
    except ModuleNotFoundError as error:
        raise _RejectedError("broken", f"it names {error.name!r}, which does not exist") from error
    _broken_if(_validation.names_of_pack(pack, operations, names))
    return dataclasses.replace(claim, pack=pack, operations=operations)


def _checked_answers(claim: PluginRecord) -> PluginRecord:
    manager = _manager(claim)
    plugin: Plugin = _description(claim, manager, "ejkernel_plugin")
    _broken_if(_validation.plugin(plugin, claim.name))
    complaint = _validation.api_level(plugin.api_level, claim.distribution)
    if complaint:
        raise _RejectedError("incompatible", complaint)
    _broken_if(_validation.contents(plugin))
    tables, complaint = _validation.tables(_ask(claim, manager, "ejkernel_tuned_configs"))
    _broken_if(complaint)
    quarantine, complaint = _validation.quarantine(_ask(claim, manager, "ejkernel_quarantined_configs"), plugin)
    _broken_if(complaint)
    return dataclasses.replace(claim, plugin=plugin, tables=tables, quarantine=quarantine)


def _ask(claim: PluginRecord, manager: pluggy.PluginManager, hook: str) -> list[Any]:
    try:
        return contained(claim.who, getattr(manager.hook, hook), watch="everything")
    except Exception as error:  # whatever it raises is this plugin's trouble only
        raise _RejectedError("broken", f"{hook}() raised {raised(error)}") from error


def _broken_if(complaint: str | None) -> None:
    if complaint:
        raise _RejectedError("broken", complaint)


def _refuse_unmet(plugin: Plugin) -> None:
    try:
        missing, unfit, wanted = _requirements.unmet(plugin.requires, plugin.versions)
    except ValueError as error:
        raise _RejectedError("broken", f"its requirements cannot be read: {raised(error)}") from error
    if missing or unfit:
        state: State = "missing requirement" if missing else "incompatible"
        raise _RejectedError(state, f"{'; '.join([*missing, *unfit])}; {_requirements.pip_install(wanted)}")


def _message(record: PluginRecord) -> str:
    return f"{record.who} cannot be used, {record.state}: {record.reason}. Run `ejkernel doctor` for details."


def _remark(record: PluginRecord) -> str:
    return f"{record.who} takes {record.seconds:.1f} s to import, which delays every program; report it to its authors"


def _unknown_operations(record: PluginRecord) -> Iterator[str]:
    named = (one.operation for one in record.plugin.implementations) if record.ok and record.plugin else ()
    for name in dict.fromkeys(named):
        if name not in OPERATIONS:
            what = f"implements {name!r}, which is no operation" + suggestion(name, OPERATIONS)
            yield f"{record.who} {what}. Run `ejkernel doctor` for details."


def _unknown(allowed: tuple[str, ...], found: set[str]) -> Iterator[str]:
    for name in dict.fromkeys(allowed):
        if name not in found:
            close = suggestion(name, {*found, *FIRST_PARTY})
            remedy = f"; pip install {FIRST_PARTY[name]}" if name in FIRST_PARTY else close
            yield f"EJKERNEL_PLUGINS: got {name!r}, expected the name of an installed plugin{remedy}"


def _complain(messages: list[str]) -> None:
    if messages and is_strict():
        raise PluginError("\n".join(messages))
    for message in messages:
        warn(message, PluginWarning)
