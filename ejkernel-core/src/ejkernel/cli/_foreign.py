"""Finds other distributions that put files into the import package `ejkernel`."""

from __future__ import annotations

import re

from importlib_metadata import Distribution
from packaging.utils import canonicalize_name

from ejkernel._plugins.claims import installed_distributions, metadata_file

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
    listed = metadata_file(distribution, "RECORD") or metadata_file(distribution, "installed-files.txt")
    return (
        canonicalize_name(name) == PACKAGE
        or PACKAGE in metadata_file(distribution, "top_level.txt").split()
        or any(line.startswith(f"{PACKAGE}/") for line in listed.splitlines())
    )


def _identity(distribution: Distribution) -> tuple[str, str]:
    text = metadata_file(distribution, "METADATA") or metadata_file(distribution, "PKG-INFO")
    fields = dict(re.findall(r"^(Name|Version):[ \t]*(\S+)", text.partition("\n\n")[0], re.MULTILINE))
    return fields.get("Name", ""), fields.get("Version", "")
