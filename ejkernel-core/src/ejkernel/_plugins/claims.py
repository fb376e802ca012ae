"""Entry points of a group, each with the distribution that it comes from: metadata alone, nothing is imported.

`entry_points()` of the standard library loses everything when one distribution's metadata cannot be read; here every distribution
is read by itself.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

import importlib_metadata
from importlib_metadata import Distribution

from ejkernel._plugins import identity as _identities, requirements as _requirements
from ejkernel._plugins.records import OWNERS, PluginRecord, State
from ejkernel.plugin import ENTRY_POINT_GROUP, OPERATIONS_GROUP

GROUP_OF_COMMANDS = "ejkernel.commands"
_GROUPS = (ENTRY_POINT_GROUP, OPERATIONS_GROUP, GROUP_OF_COMMANDS)


class _Copy(NamedTuple):
    """One of several distributions of the same name."""

    folder: str
    version: str


def installed_distributions(**options: str) -> Iterator[Distribution]:
    """Everything installed; the library types what its finders return as less than they are."""
    return cast("Iterator[Distribution]", iter(importlib_metadata.distributions(**options)))


def entry_points_files() -> tuple[tuple[Distribution, str], ...]:
    """Every installed distribution that has entry points, with the text of the file."""
    found = ((distribution, metadata_file(distribution, "entry_points.txt")) for distribution in installed_distributions())
    return tuple((distribution, text) for distribution, text in found if text)


def claims_of(group: str, files: Iterable[tuple[Distribution, str]] | None = None) -> Iterator[PluginRecord]:
    """A blank record per entry point of a group; of several copies of a distribution on the path only the first counts.

    `files` is what `entry_points_files` found, where that is known already. What cannot be taken at its word is marked so: it has
    no name, a copy of another version lies in the same folder, or it bears a name of ours and is another's.
    """
    seen: dict[str, _Copy] = {}
    for distribution, text in entry_points_files() if files is None else files:
        if not _mentions(group, text):
            continue
        name, version = _identity(distribution)
        if name is None:
            remains = _folder_name(distribution)
            blank = PluginRecord(remains, remains, "", "", "ok", group=group)
            yield ended(blank, "broken", "its METADATA is missing or names no distribution; reinstall it, or delete the folder")
            continue
        key, copy = _requirements.canonical(name), _Copy(str(distribution.locate_file("")), version)
        blank, ours = PluginRecord(name, name, version, "", "ok", group=group), key in OWNERS.get(group, {}).values()
        # Of ours, whichever is genuine counts, as an earlier one may be another's.
        earlier = seen.get(key) or (None if ours else _first_copy(name))
        if earlier is not None and earlier != copy:
            if earlier.folder == copy.folder:
                reason = f"version {earlier.version} of it lies in the same folder, {copy.folder}, and files of both are mixed"
                yield ended(blank, "conflict", f"{reason}; pip install --force-reinstall {name}")
            continue
        claims = [*_claims(distribution, blank, group)] or [_unread(blank, group, text)]
        if not ours or any(claim.ok for claim in claims):
            seen[key] = copy
        yield from claims


def _heads(text: str) -> list[str]:
    """The heads of sections, also of a damaged file: cut, behind other signs, or of letters that are two bytes long."""
    return [line.strip() for line in text.replace("\0", "").splitlines() if "[" in line or "]" in line]


def _mentions(group: str, text: str) -> bool:
    """Whether a file has entry points of a group, or would have them if it were whole and the group's name spelt right."""
    heads = _heads(text)
    names = [head.strip("\ufeff\ufffd[] \t").lower() for head in heads]
    others = {*_GROUPS} - {group}
    if any(name == group or (name not in others and difflib.get_close_matches(name, [group], cutoff=0.9)) for name in names):
        return True
    return bool(heads) and not heads[-1].endswith("]") and names[-1].startswith("ejkernel.") and group.startswith(names[-1])


def _unread(blank: PluginRecord, group: str, text: str) -> PluginRecord:
    """For a file that mentions a group and has no entry point of it."""
    heads = ", ".join(repr(head) for head in _heads(text) if "ejkernel" in head.lower())
    reason = f"its entry_points.txt is damaged or misspelt: got {heads}, expected '[{group}]' with an entry point below it"
    return ended(blank, "broken", f"{reason}; reinstall it, or report it to its authors")


def _claims(distribution: Distribution, blank: PluginRecord, group: str) -> Iterator[PluginRecord]:
    """The entry points of one distribution."""
    try:
        entries = [entry for entry in distribution.entry_points if entry.group == group]
    except Exception:  # noqa: BLE001 - whatever the standard library makes of a malformed file, it is reported
        yield ended(blank, "broken", "its entry_points.txt cannot be read", with_traceback=True)
        return
    for entry in entries:
        claim = dataclasses.replace(blank, name=entry.name, value=entry.value)
        complaint = None
        if group == ENTRY_POINT_GROUP and claim.first_party:
            complaint = _identities.complaint(claim.name, distribution, claim.value, _other_copies(distribution, blank))
        yield ended(claim, "conflict", complaint) if complaint else claim


def _other_copies(distribution: Distribution, blank: PluginRecord) -> list[str]:
    """Folders of other distributions of the same name."""
    places = (str(copy.locate_file("")) for copy in installed_distributions(name=blank.name) if _identity(copy)[0])
    return sorted({*places} - {str(distribution.locate_file(""))})


def _folder_name(distribution: Distribution) -> str:
    """What a distribution without a name is known by: the folder of its metadata."""
    return os.path.basename(str(getattr(distribution, "_path", ""))) or "(a distribution without a name)"


def metadata_file(distribution: Distribution, name: str) -> str:
    """A metadata file, with marks in place of what is no UTF-8; empty where it is missing."""
    try:
        return distribution.read_text(name) or ""
    except UnicodeDecodeError as error:
        return bytes(error.object).decode("utf-8", "replace")
    except OSError:
        return ""


def _identity(distribution: Distribution) -> tuple[str | None, str]:
    """Name and version; no name where the metadata is gone, which an interrupted uninstallation leaves behind."""
    text = metadata_file(distribution, "METADATA") or metadata_file(distribution, "PKG-INFO")
    fields = dict(re.findall(r"^(Name|Version):[ \t]*(\S+)", text.partition("\n\n")[0], re.MULTILINE))
    return fields.get("Name"), fields.get("Version", "")


def _first_copy(name: str) -> _Copy | None:
    """The first distribution of this name on the path, which hides all others."""
    for found in installed_distributions(name=name):
        first, version = _identity(found)
        if first is not None:
            return _Copy(str(found.locate_file("")), version)
    return None


def ended(claim: PluginRecord, state: State, reason: str, *, with_traceback: bool = False) -> PluginRecord:
    """The record with the state that its examination ended in, with the traceback of the exception at hand if asked for."""
    text = ""
    if with_traceback and (error := sys.exception()) is not None:
        text = "".join(traceback.format_exception(error.__cause__ or error))
    return dataclasses.replace(claim, state=state, reason=reason, traceback=text)
