"""Finds other distributions that put files into the import package `ejkernel`."""

from __future__ import annotations

import re

from importlib_metadata import Distribution
from packaging.utils import canonicalize_name

from ejkernel._plugins.claims import installed_distributions

OURS, PACKAGE = "ejkernel-core", "ejkernel"


def foreign_distributions() -> list[dict[str, str]]:
    """Name and version of each, as installed on this interpreter's path; files of theirs and ours lie in one folder.

    Our own loop: the standard library's `packages_distributions()` fails altogether on one distribution's damaged metadata.
    """
    found: dict[str, str] = {}
    for distribution in installed_distributions():
        name, version = _identity(distribution)
        if name and canonicalize_name(name) != OURS and _owns(distribution, name):
            found.setdefault(canonicalize_name(name), version)
    return [{"distribution": name, "version": version} for name, version in sorted(found.items())]


def _owns(distribution: Distribution, name: str) -> bool:
    """Whether its name or its list of files says so; an editable installation lists no files."""
    listed = _text(distribution, "RECORD") or _text(distribution, "installed-files.txt")
    return (
        canonicalize_name(name) == PACKAGE
        or PACKAGE in _text(distribution, "top_level.txt").split()
        or any(line.startswith(f"{PACKAGE}/") for line in listed.splitlines())
    )


def _identity(distribution: Distribution) -> tuple[str, str]:
    text = _text(distribution, "METADATA") or _text(distribution, "PKG-INFO")
    fields = dict(re.findall(r"^(Name|Version):[ \t]*(\S+)", text.partition("\n\n")[0], re.MULTILINE))
    return fields.get("Name", ""), fields.get("Version", "")


def _text(distribution: Distribution, name: str) -> str:
    """A metadata file; empty where it is missing or cannot be read."""
    try:
        return distribution.read_text(name) or ""
    except (OSError, UnicodeError):
        return ""
