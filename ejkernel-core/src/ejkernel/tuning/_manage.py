"""Looking after the user's cache: what `ejkernel cache` shows, clears, exports and merges."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from ejkernel._plugins.registry import kernel_registry
from ejkernel.configs import quarantine as _quarantine, store as _store
from ejkernel.configs.entry import Entry
from ejkernel.configs.key import Key, running_versions
from ejkernel.configs.quarantine import Quarantined
from ejkernel.configs.result import AutotuningResult

CacheState = Literal["ok", "other version", "unreadable"]


@dataclasses.dataclass(frozen=True)
class CacheFile:
    """One file of the cache.

    Attributes:
        path: where it is.
        bytes: its size.
        state: `"ok"`; `"other version"` for an entry of another jax or core, which does not answer here; `"unreadable"`.
        entry: the tuned config that it holds, if it does.
        quarantined: the quarantined config that it holds, if it does.
        reason: why it is unreadable.
    """

    path: Path
    bytes: int
    state: CacheState
    entry: Entry | None = None
    quarantined: Quarantined | None = None
    reason: str = ""

    @property
    def key(self) -> Key | None:
        """What it belongs to; None if unreadable."""
        content = self.entry or self.quarantined
        return None if content is None else content.key

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        contents = {"entry": self.entry, "quarantined": self.quarantined}
        shown = {name: None if content is None else content.to_dict() for name, content in contents.items()}
        return {"path": str(self.path), "bytes": self.bytes, "state": self.state, "reason": self.reason, **shown}


@dataclasses.dataclass(frozen=True)
class CacheInfo:
    """The cache as a whole: where tuned configs are, how many files and bytes there are, also of quarantined ones, and how many
    files in each state."""

    directory: Path
    count: int
    bytes: int
    states: Mapping[str, int]
    quarantined: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**dataclasses.asdict(self), "directory": str(self.directory)}


def cache_entries() -> list[CacheFile]:
    """Every file of the cache, whatever is in it: tuned configs, then quarantined ones."""
    tuned = [_examine(path, _store.read) for path in _store.files(_store.directory())]
    return [*tuned, *(_examine(path, _quarantine.read) for path in _quarantine.files())]


def cache_info() -> CacheInfo:
    """Where the cache is, and its size."""
    found = cache_entries()
    states = collections.Counter(file.state for file in found)
    quarantined = sum(_is_of_quarantine(file) for file in found)
    return CacheInfo(_store.directory(), len(found), sum(file.bytes for file in found), dict(states), quarantined)


def clear_cache(operation: str | None = None, state: CacheState | None = None, *, quarantine: bool | None = None) -> int:
    """Delete entries of the cache, and nothing else.

    Args:
        operation: only those of this operation.
        state: only files in this state.
        quarantine: True for quarantined configs only, which may then be chosen again; False for tuned ones only.

    Returns:
        How many were deleted.
    """
    count = 0
    for file in cache_entries():
        of_operation = operation is None or (file.key is not None and file.key.operation == operation)
        if of_operation and state in (None, file.state) and quarantine in (None, _is_of_quarantine(file)):
            file.path.unlink(missing_ok=True)
            count += 1
    if operation is None and state is None:
        _clear_leftovers(quarantine)
    kernel_registry.refresh()
    return count


def _clear_leftovers(quarantine: bool | None) -> None:
    """What writers that were killed have left, records that could not be written, and folders that are empty now."""
    folders = [] if quarantine else [_store.directory()]
    if quarantine is not False:
        folders += _quarantine.folders()
        _quarantine.forget_unwritten()
    for folder in folders:
        for path in _store.leftovers(folder):
            path.unlink(missing_ok=True)
        if folder != _store.directory():
            with contextlib.suppress(OSError):  # not empty: another process is writing there
                folder.rmdir()


def export_cache(path: str | os.PathLike[str], operation: str | None = None) -> int:
    """Write the cache's readable entries to one file, in the form of a table that a plugin ships; how many there were."""
    entries = [file.entry for file in cache_entries() if file.entry is not None]
    chosen = tuple(entry for entry in entries if operation in (None, entry.key.operation))
    AutotuningResult(chosen).save(path)
    return len(chosen)


def merge_cache(path: str | os.PathLike[str], *, replace: bool = False) -> int:
    """Take the entries of an exported file or table into the cache.

    Args:
        path: the file.
        replace: also those for which the cache already has a readable entry.

    Returns:
        How many were written.

    Raises:
        ValueError: the file holds something else, or an entry without a check that passed; then nothing is taken.
    """
    incoming = AutotuningResult.load(path)
    known = set() if replace else {file.entry.key for file in cache_entries() if file.entry is not None}
    return AutotuningResult(tuple(entry for entry in incoming.entries if entry.key not in known)).store()


def _is_of_quarantine(file: CacheFile) -> bool:
    return _quarantine.directory() in file.path.parents


def _examine(path: Path, read: Callable[[Path], Entry | Quarantined]) -> CacheFile:
    try:
        size = path.stat().st_size
        content = read(path)
    except (OSError, ValueError) as error:
        return CacheFile(path, path.stat().st_size if path.exists() else 0, "unreadable", reason=str(error))
    current = (content.key.jax, content.key.core) == running_versions() and _is_in_force(content)
    state: CacheState = "ok" if current else "other version"
    if isinstance(content, Entry):
        return CacheFile(path, size, state, entry=content)
    return CacheFile(path, size, state, quarantined=content)


def _is_in_force(content: Entry | Quarantined) -> bool:
    """Whether a quarantined config is so under the installed versions; one of a platform that is not here can only be kept."""
    if isinstance(content, Entry):
        return True
    candidates = kernel_registry.candidates(content.key.operation, content.key.phase)  # pyright: ignore[reportArgumentType]
    versions = [_quarantine.compiling_versions(c) for c in candidates if c.id == content.key.implementation]
    return not versions or content.versions in versions
