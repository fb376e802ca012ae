"""The user's cache: one JSON file per entry, written by atomic rename.

Concurrent processes never see a file that is half written, and entries of different keys never share one; of two processes that
store the same key, the later wins. Only files of this module's own names, in its own folder, are ever read, written or deleted.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

from ejkernel._plugins.containment import refuse_answers
from ejkernel._plugins.registry import kernel_registry
from ejkernel.configs.entry import LEVEL, Entry, dump_entries, load_entries, require_verified
from ejkernel.configs.key import Key
from ejkernel.utils.cache_folder import UntrustedError, cache_folder, distrust, read_file, replace_file
from ejkernel.utils.warn_once import warn_once

_NAME = re.compile(r"[0-9a-f]{64}\.json")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\..*\.tmp")


def directory() -> Path:
    """Where entries are: a folder of `EJKERNEL_CACHE_DIR`, or of the platform's cache directory. It need not exist."""
    return cache_folder() / f"configs-{LEVEL}"


class UserCache:
    """Entries on disk, each file read at most once per registry epoch, and each miss asked for at most once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[Key, Entry | None] = {}
        self._valid: tuple[Path, int] | None = None

    def lookup(self, key: Key) -> Entry | None:
        """The entry of exactly this key; None if there is none that can be used."""
        folder = directory()
        with self._lock:
            if self._valid != (folder, kernel_registry.epoch):
                self._seen.clear()
                self._valid = (folder, kernel_registry.epoch)
            if key in self._seen:
                return self._seen[key]
            # Known as a miss before it is read, so that a warning that is an error leaves it a miss.
            self._seen[key] = None
            self._seen[key] = entry = _lookup(folder, key)
            return entry

    def store(self, entry: Entry) -> bool:
        """Write an entry; programs compiled before are traced again.

        Returns:
            Whether it was written; a directory that cannot be written gives one `CacheWarning`.

        Raises:
            ValueError: the entry has no check against the reference that passed.
        """
        refuse_answers("store")
        require_verified(entry)
        written = write(directory(), entry.key.digest, dump_entries((entry,)))
        if written:
            kernel_registry.refresh()
        return written


def read(path: Path) -> Entry:
    """The entry in one file.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds something else.
    """
    entries = load_entries(read_file(path).decode("utf-8"))
    if len(entries) != 1:
        raise ValueError(f"{len(entries)} entries in place of one")
    if path.name != f"{entries[0].key.digest}.json":
        raise ValueError("holds the entry of another key")
    return entries[0]


def _lookup(folder: Path, key: Key) -> Entry | None:
    path = folder / f"{key.digest}.json"
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        warn_once(folder, f"the tuning cache cannot be read ({error.strerror or error}); going on without it")
    except ValueError as error:
        warn_once(path, f"ignored: {error}; delete it or run `ejkernel cache clear`")
    return None


def write(folder: Path, digest: str, text: str) -> bool:
    """Put a file in place in one step; False, with one warning per folder, if that cannot or must not be."""
    try:
        replace_file(folder / f"{digest}.json", text.encode())
    except UntrustedError:
        return False
    except OSError as error:
        message = f"the tuning cache cannot be written ({error.strerror or error}); what was found holds for this process only"
        remedy = "free space or permit writing there, or let EJKERNEL_CACHE_DIR name another folder"
        warn_once(f"{cache_folder()} (writing)", f"{message}: {remedy}")
        return False
    return True


def files(folder: Path) -> Iterator[Path]:
    """Every file of this module's own naming, in order; nothing where there is no folder, or others can write to it."""
    if folder.is_dir() and not distrust(folder):
        yield from sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def leftovers(folder: Path) -> Iterator[Path]:
    """Temporary files of writers that were killed, or are at work just now."""
    if folder.is_dir() and not distrust(folder):
        yield from sorted(path for path in folder.iterdir() if _TEMPORARY.fullmatch(path.name))


USER_CACHE = UserCache()
