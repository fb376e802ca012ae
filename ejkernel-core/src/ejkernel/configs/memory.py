"""The process's own store of chosen configs."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ejkernel._plugins.containment import refuse_answers
from ejkernel._plugins.registry import kernel_registry
from ejkernel.configs.entry import Entry, require_verified
from ejkernel.configs.key import Key

_lock = threading.Lock()
_entries: dict[Key, Entry] = {}


def lookup(key: Key) -> Entry | None:
    """What this process remembers for a key."""
    return _entries.get(key)


def remember(*entries: Entry) -> None:
    """Use these entries for the rest of the process, before the cache on disk. Programs compiled before are traced again.

    Raises:
        ValueError: an entry has no check against the reference that passed; then none is taken.
    """
    refuse_answers("remember")
    for entry in entries:
        require_verified(entry)
    with _lock:
        _entries.update((entry.key, entry) for entry in entries)
    kernel_registry.refresh()


def forget(keys: Iterable[Key] | None = None) -> None:
    """Drop what `remember` took: the entries of these keys, or all."""
    with _lock:
        for key in list(_entries) if keys is None else keys:
            _entries.pop(key, None)
    kernel_registry.refresh()


def remembered() -> tuple[Entry, ...]:
    """Every entry in force by `remember`."""
    with _lock:
        return tuple(_entries.values())
