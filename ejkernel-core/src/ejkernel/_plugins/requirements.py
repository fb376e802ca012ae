"""What a plugin needs installed: import names that must be findable, and versions that must fit. Nothing is imported."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import importlib_metadata

_PLAIN_VERSION = re.compile(r"\d+(\.\d+)*")
_PLAIN_CLAUSE = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d+(?:\.\d+)*)")
COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
"""The comparisons that a requirement, or a quarantine's condition on a config, may make."""


def canonical(name: str) -> str:
    """The name of a distribution as packaging tools compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def findable(name: str) -> bool:
    """Whether `import name` would find a module. Parents of a dotted name are located, not imported."""
    path: Sequence[str] | None = None
    prefix = ""
    for part in name.split("."):
        prefix = f"{prefix}.{part}" if prefix else part
        if prefix in sys.modules:
            path = list(getattr(sys.modules[prefix], "__path__", ()))
            continue
        # importlib.util.find_spec would import the parents
        specs = (finder.find_spec(prefix, path) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations or ())
    return True


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution; None if it is not installed. The library's own parser takes 7 ms to import."""
    try:
        found = importlib_metadata.distribution(distribution)
    except importlib_metadata.PackageNotFoundError:
        return None
    text = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
    version = re.search(r"^Version:[ \t]*(\S+)", text.partition("\n\n")[0], re.MULTILINE)
    return version[1] if version else None


def admits(specifier: str, version: str) -> bool:
    """Whether a version fits a PEP 440 specifier; pre-releases count.

    Plain releases under plain clauses are compared here: `packaging` takes as long to import as all the rest of discovery.

    Raises:
        ValueError: the specifier or the version is malformed.
    """
    clauses = [_PLAIN_CLAUSE.fullmatch(clause.strip()) for clause in specifier.split(",")]
    if _PLAIN_VERSION.fullmatch(version) and all(clauses):
        return all(
            COMPARE[clause[1]](_release(version, clause[2]), _release(clause[2], version)) for clause in clauses if clause
        )
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    return SpecifierSet(specifier).contains(Version(version), prereleases=True)


def _release(version: str, other: str) -> tuple[int, ...]:
    """The numbers of a release, padded with zeros to the length of the other."""
    numbers = [int(part) for part in version.split(".")]
    return (*numbers, *[0] * (other.count(".") + 1 - len(numbers)))


def unmet(requires: Sequence[str], versions: Mapping[str, str]) -> tuple[list[str], list[str], list[str]]:
    """Examine requirements without importing them.

    Args:
        requires: import names.
        versions: distribution name to version specifier.

    Returns:
        What is missing and what does not fit, in the user's words, and what `pip install` needs to hear.

    Raises:
        ValueError: a specifier or an installed version is malformed.
    """
    specifiers = {canonical(name): specifier for name, specifier in versions.items()}
    absent = {canonical(name): f"module {name!r}" for name in requires if not findable(name)}
    unfit: list[str] = []
    wanted: list[str] = []
    for name, specifier in versions.items():
        version = installed_version(name)
        if version is None:
            absent.setdefault(canonical(name), f"distribution {name!r}")
        elif not admits(specifier, version) and canonical(name) not in absent:
            unfit.append(f"{name} {version} is installed, {specifier} is needed")
            wanted.append(f"{canonical(name)}{specifier}")
    missing = [f"{what} is not installed" for what in absent.values()]
    wanted = [f"{name}{specifiers.get(name, '')}" for name in absent] + wanted
    return missing, unfit, wanted


def pip_install(wanted: Sequence[str], *, upgrade: bool = False) -> str:
    """The command that installs these, quoted for a shell where it must be."""
    import shlex

    return " ".join(["pip install", *(["--upgrade"] if upgrade else []), *map(shlex.quote, wanted)])
