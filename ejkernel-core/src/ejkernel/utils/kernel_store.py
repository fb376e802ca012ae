"""Compiled kernels on disk, shared by processes: content under the hash of everything that it was made from.

An entry is never wrong, only absent: whoever writes a key writes the same kernel, and nobody else can write, see `cache_folder`.
Files are put in place by atomic rename and begin with a checksum, so that a damaged one is a miss. Past `MOST_BYTES` those that
were not used for longest are deleted.

What is not there is looked for in bundles: folders of the same files, which are only read. `EJKERNEL_KERNELS` names some, and
distributions bring others as folders of the namespace package `ejkernel_kernels`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import os
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

from ejkernel.utils.cache_folder import UntrustedError, cache_folder, distrust, open_to_others, read_file, replace_file
from ejkernel.utils.warn_once import warn_once

BUNDLES = "EJKERNEL_KERNELS"
BUNDLED = "ejkernel_kernels"
MANIFEST = "bundle.json"
"""Marks a folder as a bundle; `ejkernel compile` writes it last."""

MOST_BYTES = 1 << 30
_LEFT_AFTER_TRIMMING = 3 * MOST_BYTES // 4
_FOLDER = re.compile(r"kernels-[\w-]+")
_NAME = re.compile(r"[0-9a-f]{64}\.kernel")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\..*\.tmp")
_DIGEST_LENGTH = hashlib.sha256().digest_size

_collected: Path | None = None


def collect_in(folder: Path) -> None:
    """Make this process keep all compiled kernels in a folder that becomes a bundle, and read those alone."""
    global _collected
    _collected = folder


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
        return (_collected or cache_folder()) / f"kernels-{self.platform}"

    def get(self, key: str) -> bytes | None:
        """What is stored under a key of 64 hexadecimal digits, here or in a bundle; None if there is nothing or it is damaged."""
        content, path = None, self._path(key)
        try:
            content = _unpacked(read_file(path))
        except FileNotFoundError:
            pass
        except OSError as error:
            self._warn(f"compiled kernels cannot be read ({error.strerror or error}); they are compiled again")
        if content is None:
            return None if _collected else _bundled(f"{self.folder.name}/{path.name}")
        with contextlib.suppress(OSError):  # a folder that is only read keeps no order of use
            os.utime(path)
        return content

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
        if _collected is None:
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


def _unpacked(stored: bytes) -> bytes | None:
    """The content of a file; None if that is damaged."""
    digest, content = stored[:_DIGEST_LENGTH], stored[_DIGEST_LENGTH:]
    return zlib.decompress(content) if hashlib.sha256(content).digest() == digest else None


def _bundled(name: str) -> bytes | None:
    for folder in bundles():
        try:
            content = _unpacked((folder / name).read_bytes())
        except FileNotFoundError:
            continue
        except OSError:
            content = None
        if content is not None:
            return content
        warn_once(folder, f"{name} is damaged and compiled here; make the bundle again")
    return None


def bundles() -> tuple[Path, ...]:
    """The folders of bundles: those that are named, then the installed. A warning says once why another is not used."""
    return _usable(os.environ.get(BUNDLES, ""), tuple(sys.path))


@functools.lru_cache(maxsize=8)
def _usable(named: str, path: tuple[str, ...]) -> tuple[Path, ...]:
    del named, path  # all that decides what there is
    found = examined_bundles()
    for folder, problem in found.items():
        if problem:
            warn_once(folder, f"{problem}; its kernels are compiled here")
    return tuple(folder for folder, problem in found.items() if not problem)


def examined_bundles() -> dict[Path, str]:
    """Every folder that should be a bundle, and why it is not used; empty if it is.

    One that is installed is as trustworthy as the code beside it; who names another trusts its owner, and nobody else.
    """
    named = [Path(name).expanduser() for name in os.environ.get(BUNDLES, "").split(os.pathsep) if name]
    spec = importlib.util.find_spec(BUNDLED)
    roots = [Path(root) for root in (spec and spec.submodule_search_locations) or ()]
    installed = sorted(file.parent for root in roots for file in root.glob(f"*/{MANIFEST}"))
    return {**{folder: _problem(folder) for folder in named}, **dict.fromkeys(installed, "")}


def _problem(folder: Path) -> str:
    try:
        (folder / MANIFEST).stat()
        complaints = ((place, open_to_others(place.stat())) for place in (folder, *folder.glob("*"), *bundled_kernels(folder)))
        return next((f"not used: {place}: {complaint}" for place, complaint in complaints if complaint), "")
    except OSError as error:
        return f"no bundle of kernels: {MANIFEST}: {error.strerror or error}"


def bundled_kernels(folder: Path) -> list[Path]:
    """The files of a bundle's kernels."""
    return sorted(folder.glob("kernels-*/*.kernel"))


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
