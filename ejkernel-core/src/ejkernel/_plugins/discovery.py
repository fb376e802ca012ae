"""Entry points -> `PluginRecord`, one isolated step per plugin.

The loop is our own. pluggy's entry-point loader stops at the first plugin that raises and loads shadowed distributions, and
`entry_points()` of the standard library loses everything when one distribution's metadata cannot be read; neither may happen
here. pluggy validates hooks and calls them, with one manager per plugin so that none can disturb another.
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
import traceback
import warnings
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple, cast

import importlib_metadata
import pluggy
from importlib_metadata import Distribution

from ejkernel._plugins import identity as _identities
from ejkernel._plugins import requirements as _requirements
from ejkernel._plugins import validation as _validation
from ejkernel._plugins.containment import contained, know_packages
from ejkernel._plugins.records import PLUGIN_IMPORT_PATIENCE, PluginRecord, State
from ejkernel._plugins.settings import is_on
from ejkernel.errors import PluginError, PluginWarning, suggestion
from ejkernel.plugin import ENTRY_POINT_GROUP, FIRST_PARTY, Hooks, Plugin

_VALUE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\s*:\s*[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)?")


class _Copy(NamedTuple):
    """One of several distributions of the same name."""

    folder: str
    version: str


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
        PluginError: under `EJKERNEL_STRICT=1`, if any plugin cannot be used. The command `ejkernel` raises it later, so that
            `ejkernel doctor` can say what is wrong.
    """
    claims = [*claims_of(ENTRY_POINT_GROUP)]
    allowed = _allowed()
    know_packages({c.value.partition(".")[0].strip(): (c.distribution, not c.first_party) for c in claims if c.value})
    records = [_examine(claim, claims, allowed) for claim in claims]
    _complain(complaints(records))
    return tuple(records)


def complaints(records: Iterable[PluginRecord]) -> list[str]:
    """What is wrong with the plugins that were found or asked for, one sentence or two each."""
    records = [*records]
    messages = [_message(record) for record in records if record.state not in ("ok", "disabled")]
    messages += [_remark(record) for record in records if record.ok and record.seconds > PLUGIN_IMPORT_PATIENCE]
    return [*messages, *_unknown(_allowed() or (), {record.name for record in records})]


def is_strict() -> bool:
    """Whether `EJKERNEL_STRICT` asks for errors in place of warnings."""
    return is_on("EJKERNEL_STRICT")


def installed_distributions(**options: str) -> Iterator[Distribution]:
    """Everything installed; the library types what its finders return as less than they are."""
    return cast("Iterator[Distribution]", iter(importlib_metadata.distributions(**options)))


def claims_of(group: str) -> Iterator[PluginRecord]:
    """A blank record per entry point of a group; of several copies of a distribution on the path only the first counts.

    What cannot be taken at its word is marked so: it has no name, a copy of another version lies in the same folder, or it bears a
    name of ours and is another's.
    """
    seen: dict[str, _Copy] = {}
    for distribution in installed_distributions():
        if group not in _text(distribution, "entry_points.txt"):
            continue
        name, version = _identity(distribution)
        if name is None:
            remains = _folder_name(distribution)
            blank = PluginRecord(remains, remains, "", "", "ok")
            yield _ended(
                blank, "broken", "its METADATA is missing or names no distribution; reinstall it, or delete the folder"
            )
            continue
        key, copy = _requirements.canonical(name), _Copy(str(distribution.locate_file("")), version)
        blank, ours = PluginRecord(name, name, version, "", "ok"), key in FIRST_PARTY.values()
        # Of ours, whichever is genuine counts, as an earlier one may be another's.
        earlier = seen.get(key) or (None if ours else _first_copy(name))
        if earlier is not None and earlier != copy:
            if earlier.folder == copy.folder:
                reason = f"version {earlier.version} of it lies in the same folder, {copy.folder}, and files of both are mixed"
                yield _ended(blank, "conflict", f"{reason}; pip install --force-reinstall {name}")
            continue
        claims = [*_claims(distribution, blank, group)]
        if not ours or any(claim.ok for claim in claims):
            seen[key] = copy
        yield from claims


def _claims(distribution: Distribution, blank: PluginRecord, group: str) -> Iterator[PluginRecord]:
    """The entry points of one distribution."""
    try:
        entries = [entry for entry in distribution.entry_points if entry.group == group]
    except Exception:  # noqa: BLE001 - whatever the standard library makes of a malformed file, it is reported
        yield _ended(blank, "broken", "its entry_points.txt cannot be read", with_traceback=True)
        return
    for entry in entries:
        claim = dataclasses.replace(blank, name=entry.name, value=entry.value)
        complaint = None
        if group == ENTRY_POINT_GROUP and claim.first_party:
            complaint = _identities.complaint(claim.name, distribution, claim.value, _other_copies(distribution, blank))
        yield _ended(claim, "conflict", complaint) if complaint else claim


def _other_copies(distribution: Distribution, blank: PluginRecord) -> list[str]:
    """Folders of other distributions of the same name."""
    places = (str(copy.locate_file("")) for copy in installed_distributions(name=blank.name) if _identity(copy)[0])
    return sorted({*places} - {str(distribution.locate_file(""))})


def _folder_name(distribution: Distribution) -> str:
    """What a distribution without a name is known by: the folder of its metadata."""
    return os.path.basename(str(getattr(distribution, "_path", ""))) or "(a distribution without a name)"


def _text(distribution: Distribution, name: str) -> str:
    """A metadata file; empty where it is missing or no text. What cannot be read cannot name a plugin."""
    try:
        return distribution.read_text(name) or ""
    except (OSError, UnicodeError):
        return ""


def _identity(distribution: Distribution) -> tuple[str | None, str]:
    """Name and version; no name where the metadata is gone, which an interrupted uninstallation leaves behind."""
    text = _text(distribution, "METADATA") or _text(distribution, "PKG-INFO")
    fields = dict(re.findall(r"^(Name|Version):[ \t]*(\S+)", text.partition("\n\n")[0], re.MULTILINE))
    return fields.get("Name"), fields.get("Version", "")


def _first_copy(name: str) -> _Copy | None:
    """The first distribution of this name on the path, which hides all others."""
    for found in installed_distributions(name=name):
        first, version = _identity(found)
        if first is not None:
            return _Copy(str(found.locate_file("")), version)
    return None


def _allowed() -> tuple[str, ...] | None:
    """The allow-list `EJKERNEL_PLUGINS`; None where it is not set."""
    text = os.environ.get("EJKERNEL_PLUGINS")
    return None if text is None else tuple(part.strip().lower() for part in text.split(",") if part.strip())


def _examine(claim: PluginRecord, claims: Iterable[PluginRecord], allowed: tuple[str, ...] | None) -> PluginRecord:
    if allowed is not None and claim.name not in allowed:
        return _ended(claim, "disabled", "EJKERNEL_PLUGINS does not name it")
    if not claim.ok:
        return claim
    try:
        _refuse_conflict(claim, claims)
        with _undisturbed():
            claim = _load(claim)
            claim, plugin = _answers(claim)
        _refuse_unmet(plugin)
    except _RejectedError as rejected:
        # `raise _RejectedError from error` keeps the plugin's own exception, whose traceback its author needs
        return _ended(claim, rejected.state, rejected.reason, with_traceback=rejected.__cause__ is not None)
    return claim


@contextlib.contextmanager
def _undisturbed() -> Generator[None]:
    """Keep what a plugin prints off the standard output, which belongs to the program, and its changes to warnings to itself."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr or io.StringIO()):
        yield


def _ended(claim: PluginRecord, state: State, reason: str, *, with_traceback: bool = False) -> PluginRecord:
    text = ""
    if with_traceback and (error := sys.exception()) is not None:
        text = "".join(traceback.format_exception(error.__cause__ or error))
    return dataclasses.replace(claim, state=state, reason=reason, traceback=text)


def _refuse_conflict(claim: PluginRecord, claims: Iterable[PluginRecord]) -> None:
    """A name belongs to one distribution: a reserved one to its owner, any other to nobody if two claim it."""
    complaint = _validation.platform_name(claim.name)
    if complaint:
        raise _RejectedError("broken", complaint)
    owner = FIRST_PARTY.get(claim.name)
    owned = owner is not None and _requirements.canonical(claim.distribution) == owner
    if owner is not None and not owned:
        raise _RejectedError("conflict", f"the platform name {claim.name!r} belongs to {owner}; use another name")
    rivals = [other for other in claims if other.ok and other.name == claim.name and other is not claim]
    rivals = [other for other in rivals if not owned or other.distribution == claim.distribution]
    if rivals:
        if all(other.distribution == claim.distribution for other in rivals):
            raise _RejectedError("conflict", f"it claims the platform name {claim.name!r} more than once")
        others = ", ".join(f"{other.distribution} {other.version}" for other in rivals)
        uninstall = " or ".join(f"pip uninstall {name}" for name in (claim.distribution, *(o.distribution for o in rivals)))
        raise _RejectedError("conflict", f"{others} claims the platform name {claim.name!r} too; {uninstall}")


def _load(claim: PluginRecord) -> PluginRecord:
    """Import the plugin module, and keep how long that took and what it dragged in."""
    if not _VALUE.fullmatch(claim.value.strip()):
        raise _RejectedError("broken", f"its entry point names {claim.value!r}, expected a module such as 'acme._plugin'")
    entry = importlib_metadata.EntryPoint(claim.name, claim.value.strip(), ENTRY_POINT_GROUP)
    before = {*sys.modules}
    start = time.perf_counter()
    try:
        module = contained(_who(claim), lambda: _second_copy(entry.load()))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin that calls sys.exit() must not end the user's program
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


def _import_failure(module: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return f"module {error.name!r}, which its entry point names, does not exist; reinstall or uninstall the distribution"
    return f"importing {module!r} raised {_line(error)}"


def _line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()


def _answers(claim: PluginRecord) -> tuple[PluginRecord, Plugin]:
    """Register the plugin module with pluggy and ask its hooks."""
    manager = pluggy.PluginManager("ejkernel")
    manager.add_hookspecs(Hooks)
    try:
        manager.register(claim.module, claim.name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise _RejectedError("broken", f"its hooks do not fit: {' '.join(str(error).split())}") from error
    answers = _ask(claim, manager, "ejkernel_plugin")
    if not answers:
        raise _RejectedError("broken", f"{claim.value!r} does not answer the hook ejkernel_plugin; mark it with @hookimpl")
    plugin = answers[0]
    _broken_if(_validation.plugin(plugin, claim.name))
    complaint = _validation.api_level(plugin.api_level, claim.distribution)
    if complaint:
        raise _RejectedError("incompatible", complaint)
    _broken_if(_validation.contents(plugin))
    tables, complaint = _validation.tables(_ask(claim, manager, "ejkernel_tuned_configs"))
    _broken_if(complaint)
    quarantine, complaint = _validation.quarantine(_ask(claim, manager, "ejkernel_quarantined_configs"), plugin)
    _broken_if(complaint)
    return dataclasses.replace(claim, plugin=plugin, tables=tables, quarantine=quarantine), plugin


def _ask(claim: PluginRecord, manager: pluggy.PluginManager, hook: str) -> list[Any]:
    try:
        return contained(_who(claim), getattr(manager.hook, hook))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as at import: whatever it raises is this plugin's trouble only
        raise _RejectedError("broken", f"{hook}() raised {_line(error)}") from error


def _broken_if(complaint: str | None) -> None:
    if complaint:
        raise _RejectedError("broken", complaint)


def _refuse_unmet(plugin: Plugin) -> None:
    try:
        missing, unfit, wanted = _requirements.unmet(plugin.requires, plugin.versions)
    except ValueError as error:
        raise _RejectedError("broken", f"its requirements cannot be read: {_line(error)}") from error
    if missing or unfit:
        state: State = "missing requirement" if missing else "incompatible"
        raise _RejectedError(state, f"{'; '.join([*missing, *unfit])}; {_requirements.pip_install(wanted)}")


def _who(record: PluginRecord) -> str:
    return f"ejkernel plugin {record.name!r} ({f'{record.distribution} {record.version}'.strip()})"


def _message(record: PluginRecord) -> str:
    return f"{_who(record)} cannot be used, {record.state}: {record.reason}. Run `ejkernel doctor` for details."


def _remark(record: PluginRecord) -> str:
    return f"{_who(record)} takes {record.seconds:.1f} s to import, which delays every program; report it to its authors"


def _unknown(allowed: tuple[str, ...], found: set[str]) -> Iterator[str]:
    for name in dict.fromkeys(allowed):
        if name not in found:
            close = suggestion(name, {*found, *FIRST_PARTY})
            remedy = f"; pip install {FIRST_PARTY[name]}" if name in FIRST_PARTY else close
            yield f"EJKERNEL_PLUGINS: got {name!r}, expected the name of an installed plugin{remedy}"


def _complain(messages: list[str]) -> None:
    if messages and is_strict() and not _is_command_line():
        raise PluginError("\n".join(messages))
    for message in messages:
        warnings.warn(message, PluginWarning, stacklevel=5)


def _is_command_line() -> bool:
    """Whether this process is the command `ejkernel`, whose own import of the package must not be what fails."""
    program = getattr(sys, "argv", None) or [""]
    return os.path.splitext(os.path.basename(program[0]))[0] == "ejkernel"
