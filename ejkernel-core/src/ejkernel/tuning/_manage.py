"""Looking after the user's cache: what `ejkernel cache` shows, clears, exports and merges."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ejkernel._registry import kernel_registry
from ejkernel.tuning import _store
from ejkernel.tuning._entry import Entry
from ejkernel.tuning._key import running_versions
from ejkernel.tuning._result import AutotuningResult

CacheState = Literal["ok", "other version", "unreadable"]


@dataclasses.dataclass(frozen=True)
class CacheFile:
    """One file of the cache.

    Attributes:
        path: where it is.
        bytes: its size.
        state: `"ok"`; `"other version"` for an entry of another jax or core, which does not answer here; `"unreadable"`.
        entry: what it holds; None if unreadable.
        reason: why it is unreadable.
    """

    path: Path
    bytes: int
    state: CacheState
    entry: Entry | None = None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        entry = None if self.entry is None else self.entry.to_dict()
        return {"path": str(self.path), "bytes": self.bytes, "state": self.state, "reason": self.reason, "entry": entry}


@dataclasses.dataclass(frozen=True)
class CacheInfo:
    """The cache as a whole: where it is, how many files and bytes, and how many files in each state."""

    directory: Path
    count: int
    bytes: int
    states: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**dataclasses.asdict(self), "directory": str(self.directory)}


def cache_entries() -> list[CacheFile]:
    """Every file of the cache, whatever is in it."""
    return [_examine(path) for path in _store.files(_store.directory())]


def cache_info() -> CacheInfo:
    """Where the cache is, and its size."""
    found = cache_entries()
    states = collections.Counter(file.state for file in found)
    return CacheInfo(_store.directory(), len(found), sum(file.bytes for file in found), dict(states))


def clear_cache(operation: str | None = None, state: CacheState | None = None) -> int:
    """Delete entries of the cache, and nothing else.

    Args:
        operation: only those of this operation.
        state: only files in this state.

    Returns:
        How many were deleted.
    """
    count = 0
    for file in cache_entries():
        of_operation = operation is None or (file.entry is not None and file.entry.key.operation == operation)
        if of_operation and state in (None, file.state):
            file.path.unlink(missing_ok=True)
            count += 1
    if operation is None and state is None:
        for path in _store.leftovers(_store.directory()):
            path.unlink(missing_ok=True)
    kernel_registry.refresh()
    return count


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


def _examine(path: Path) -> CacheFile:
    try:
        size = path.stat().st_size
        entry = _store.read(path)
    except (OSError, ValueError) as error:
        return CacheFile(path, path.stat().st_size if path.exists() else 0, "unreadable", reason=str(error))
    current = (entry.key.jax, entry.key.core) == running_versions()
    return CacheFile(path, size, "ok" if current else "other version", entry)
