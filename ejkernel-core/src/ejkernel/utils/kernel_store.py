"""Compiled kernels on disk, shared by processes: content under the hash of everything that it was made from.

An entry is never wrong, only absent: whoever writes a key writes the same kernel, and nobody else can write, see `cache_folder`.
Files are put in place by atomic rename and begin with a checksum, so that a damaged one is a miss. Past `MOST_BYTES` those that
were not used for longest are deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from ejkernel.utils.cache_folder import UntrustedError, cache_folder, distrust, read_file, replace_file
from ejkernel.utils.warn_once import warn_once

MOST_BYTES = 1 << 30
_LEFT_AFTER_TRIMMING = 3 * MOST_BYTES // 4
_FOLDER = re.compile(r"kernels-[\w-]+")
_NAME = re.compile(r"[0-9a-f]{64}\.kernel")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\..*\.tmp")
_DIGEST_LENGTH = hashlib.sha256().digest_size


@dataclasses.dataclass(frozen=True)
class KernelStore:
    """The compiled kernels of one platform.

    Attributes:
        platform: its name.
    """

    platform: str

    @property
    def folder(self) -> Path:
        """Where they are; it need not exist."""
        return cache_folder() / f"kernels-{self.platform}"

    def get(self, key: str) -> bytes | None:
        """What is stored under a key of 64 hexadecimal digits; None if there is nothing or it is damaged."""
        path = self._path(key)
        try:
            stored = read_file(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"compiled kernels cannot be read ({error.strerror or error}); they are compiled again")
            return None
        digest, content = stored[:_DIGEST_LENGTH], stored[_DIGEST_LENGTH:]
        if hashlib.sha256(content).digest() != digest:
            return None
        with contextlib.suppress(OSError):  # a folder that is only read keeps no order of use
            os.utime(path)
        return zlib.decompress(content)

    def put(self, key: str, content: bytes) -> bool:
        """Store something; False, with one warning per folder, if it cannot be or must not be written."""
        packed = zlib.compress(content)
        try:
            replace_file(self._path(key), hashlib.sha256(packed).digest() + packed)
        except UntrustedError:
            return False
        except OSError as error:
            self._warn(f"compiled kernels cannot be stored ({error.strerror or error}); other processes compile them again")
            return False
        self._trim()
        return True

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.kernel"

    def _warn(self, message: str) -> None:
        warn_once(self.folder, message)

    def _trim(self) -> None:
        sizes = {path: state for path in _files(self.folder, _NAME) if (state := _state(path)) is not None}
        total = sum(state.st_size for state in sizes.values())
        if total <= MOST_BYTES:
            return
        for path, state in sorted(sizes.items(), key=lambda item: item[1].st_mtime_ns):
            if total <= _LEFT_AFTER_TRIMMING:
                return
            _delete(path)
            total -= state.st_size


@dataclasses.dataclass(frozen=True)
class StoredKernels:
    """How many compiled kernels there are, of all platforms, and their bytes."""

    count: int
    bytes: int


def stored_kernels() -> StoredKernels:
    """What is in the cache."""
    sizes = [state.st_size for path in _of_all_platforms(_NAME) if (state := _state(path)) is not None]
    return StoredKernels(len(sizes), sum(sizes))


def clear_kernels() -> int:
    """Delete the compiled kernels of every platform, and nothing else; how many there were."""
    for path in _of_all_platforms(_TEMPORARY):
        _delete(path)
    return sum(_delete(path) for path in _of_all_platforms(_NAME))


def _of_all_platforms(pattern: re.Pattern[str]) -> Iterator[Path]:
    root = cache_folder()
    if root.is_dir():
        for folder in sorted(path for path in root.iterdir() if _FOLDER.fullmatch(path.name)):
            yield from _files(folder, pattern)


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    found = folder.iterdir() if folder.is_dir() and not distrust(folder) else ()
    return sorted(path for path in found if pattern.fullmatch(path.name))


def _state(path: Path) -> os.stat_result | None:
    """None for a file that another process has just deleted."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _delete(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:  # another process was faster, or the folder is only read
        return False
    return True
