"""Bundles of compiled kernels, which core reads (`ejkernel.utils.kernel_store`): how one is written, and what it is worth here.

`bundle.json` lists the kernels with their checksums, and what they were made with. Only `ejkernel compile` and `ejkernel doctor`
read it: a kernel of other versions has another key, and each file has its own checksum.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ejkernel import kernel_registry
from ejkernel.plugin import resolve
from ejkernel.utils.kernel_store import MANIFEST, bundled_kernels, examined_bundles

LEVEL = 1
"""Version of the manifest."""

LOWERED = "lowered"
"""The store of what core keeps: lowered code of every platform."""

_CORE = "ejkernel-core"
_COMPILER = "the compiler of "

Versions = Mapping[str, Mapping[str, str]]
"""Store -> name -> version of what its kernels were made with; empty for what is not installed."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a bundle holds.

    Attributes:
        targets: the devices that its kernels are for.
        made_with: what they were made with.
        kernels: path of each file in the bundle -> its checksum.
    """

    targets: tuple[str, ...]
    made_with: Versions
    kernels: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises:
        ValueError: it is damaged, or of another version of ejkernel.
        """
        try:
            document: Any = json.loads((folder / MANIFEST).read_bytes())
            if document["level"] != LEVEL:
                raise ValueError(f"{MANIFEST} is of another version of ejkernel-triton")
            made = {store: dict(versions) for store, versions in document["made_with"].items()}
            return cls(tuple(document["targets"]), made, dict(document["kernels"]))
        except (
            AttributeError,
            KeyError,
            OSError,
            RecursionError,
            TypeError,
            json.JSONDecodeError,
            UnicodeDecodeError,
        ) as error:
            raise ValueError(f"{MANIFEST} is missing or damaged") from error


def write_bundle(folder: Path, targets: Iterable[str], made: Versions) -> Manifest:
    """Make a bundle of the files that stores have left in a folder, for everybody to read."""
    for leftover in folder.glob("kernels-*/.*.tmp"):  # of a process that was killed
        leftover.unlink()
    kernels = bundled_kernels(folder)
    for path, mode in [(folder, 0o755), *((path.parent, 0o755) for path in kernels), *((path, 0o644) for path in kernels)]:
        path.chmod(mode)
    checksums = {path.relative_to(folder).as_posix(): _checksum(path) for path in kernels}
    document = {"level": LEVEL, "targets": sorted({*targets}), "made_with": made, "kernels": checksums}
    temporary = folder / f".{MANIFEST}"
    temporary.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    temporary.chmod(0o644)
    temporary.replace(folder / MANIFEST)
    return Manifest.read(folder)


def findings() -> Iterator[tuple[Path, str]]:
    """Every bundle that is named or installed, and in a sentence what its kernels are worth here."""
    for folder, problem in examined_bundles().items():
        try:
            yield folder, problem or worth(folder)
        except ValueError as error:
            yield folder, f"{error}; make it again with `ejkernel compile`"


def worth(folder: Path) -> str:
    """How many kernels of a bundle are of use here, and why the others are not.

    Raises:
        ValueError: its manifest cannot be read.
    """
    manifest = Manifest.read(folder)
    count = len(manifest.kernels)
    if damaged := sum(_checksum(folder / name) != checksum for name, checksum in manifest.kernels.items()):
        return f"{damaged} of its {count} kernels are missing or damaged; make it again with `ejkernel compile`"
    now = made_with(manifest.made_with.keys() - {LOWERED})
    others = {store: differences(made, now[store]) for store, made in manifest.made_with.items()}
    unused = sum(bool(others.get(name.partition("/")[0].removeprefix("kernels-"))) for name in manifest.kernels)
    if not unused:
        return f"its {count} kernels are used for {' and '.join(manifest.targets)}"
    what = "; ".join(dict.fromkeys(text for texts in others.values() for text in texts))
    share = f"none of its {count} kernels is" if unused == count else f"{unused} of its {count} kernels are not"
    return f"was made for {what}: {share} used"


def made_with(platforms: Iterable[str]) -> dict[str, dict[str, str]]:
    """What everything that these platforms compile here depends on.

    Kernels depend on compilers and on their own sources; lowered code on those, on JAX and on all sources.
    """
    records = {record.name: record for record in kernel_registry.records if record.ok}
    lowered = {**_versions(("jax", "jaxlib")), _CORE: _with_sources(_CORE, "ejkernel")}
    stores: dict[str, dict[str, str]] = {}
    for name in sorted(platforms):
        record = records.get(name)
        needed = record.plugin.versions if record is not None and record.plugin is not None else ()
        stores[name] = {**_versions(needed), f"{_COMPILER}{name}": _compiler(name)}
        lowered |= stores[name]
        if record is not None:
            lowered[record.distribution] = _with_sources(record.distribution, record.value.partition(".")[0])
    return {LOWERED: lowered, **stores}


def differences(made: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """What was another then, in words; builds and settings of compilers only where no version says it."""
    others = [name for name, then in made.items() if then != here.get(name, "")]
    said = [name for name in others if not name.startswith(_COMPILER)] or others
    return [f"{name} {made[name]}, {f'this is {now}' if (now := here.get(name)) else 'which is not here'}" for name in said]


def _versions(names: Iterable[str]) -> dict[str, str]:
    return {name: _version(name) for name in names}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _with_sources(distribution: str, package: str) -> str:
    found, spec = hashlib.sha256(), importlib.util.find_spec(package)
    for root in map(Path, (spec and spec.submodule_search_locations) or ()):
        for path in sorted(root.rglob("*.py")):
            found.update(f"{path.relative_to(root)} {_checksum(path)}".encode())
    return f"{_version(distribution)}+{found.hexdigest()[:8]}"


def _compiler(platform: str) -> str:
    """A hash of what a platform's `lowered_from` says: builds and settings of compilers."""
    implementations = [one.implementation for one in kernel_registry.list_implementations() if one.platform == platform]
    asked = dict.fromkeys(one.lowered_from for one in implementations if one.lowered_from is not None)
    return hashlib.sha256(repr([resolve(reference)() for reference in asked]).encode()).hexdigest()[:8] if asked else ""


def _checksum(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
