"""The user's cache folder: how a file is put there in one step, and what in it is trusted.

Whoever can write there chooses which code and configs run. So a folder or file counts as absent, and nothing is written to it,
where another user owns it or can write to it; `root` may own it, who can do so anyway. The cache folder itself may be open to
others, such as one in a shared volume: what they put in place of a folder of ours is theirs, and seen to be. Windows keeps
folders of a user closed by other means.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import stat
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from ejkernel.utils.warn_once import warn_once

_OURS = re.compile(r"(configs|quarantine|kernels)-[\w-]+")


class UntrustedError(FileNotFoundError):
    """What others can write to counts as absent. A warning has said so."""


@functools.cache
def _default_directory() -> str:
    import platformdirs

    return platformdirs.user_cache_dir("ejkernel")


def cache_folder() -> Path:
    """`EJKERNEL_CACHE_DIR`, or the platform's cache directory. It need not exist."""
    return Path(os.environ.get("EJKERNEL_CACHE_DIR") or _default_directory()).expanduser()


class Distrust(NamedTuple):
    """A folder or file of the cache that is not used, and why."""

    place: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"

    @property
    def message(self) -> str:
        """Why, and what helps."""
        remedy = "own it and close it to others (chmod go-w), or let EJKERNEL_CACHE_DIR name another folder"
        return f"not used, as {self.reason} and so choose what runs; {remedy}"

    def error(self) -> UntrustedError:
        """Warns, the first time."""
        warn_once(self.place, self.message)
        return UntrustedError(errno.ENOENT, self.reason, str(self.place))


def distrust(folder: Path) -> Distrust | None:
    """Why a folder of the cache is not used; None if it is, also where it does not exist."""
    root = cache_folder()
    found = [folder, *folder.parents]
    for place in reversed(found[: found.index(root) + 1] if root in found else found[:1]):
        try:
            link, state = place.lstat(), place.stat()
        except OSError:  # absent, or out of reach, which whoever reads or writes there hears of
            return None
        if reason := _owner(link) or _owner(state) or ("" if place == root else open_to_others(state)):
            return Distrust(place, reason)
    return None


def usable(folder: Path) -> bool:
    """Whether a folder of the cache may be read and written; if not, one warning says why."""
    found = distrust(folder)
    if found is not None:
        found.error()
    return found is None


def all_distrusted() -> list[Distrust]:
    """Every folder and file of the cache that is not used."""
    root = cache_folder()
    own = [place for place in root.iterdir() if _OURS.fullmatch(place.name)] if root.is_dir() and not distrust(root) else []
    found, folders = [distrust(root)], [place for place in sorted(own) if place.is_dir()]
    while folders:
        found.append(distrust(folder := folders.pop(0)))
        inside = sorted(folder.iterdir()) if found[-1] is None else []
        folders += [place for place in inside if place.is_dir() and not place.is_symlink()]
        found += [Distrust(place, reason) for place in inside if place.is_file() and (reason := _others(place.stat()))]
    return [one for one in found if one is not None]


def _owner(state: os.stat_result) -> str:
    """Complains of another owner."""
    if sys.platform == "win32" or state.st_uid in (0, os.geteuid()):
        return ""
    return f"user {state.st_uid} can write to it"


def open_to_others(state: os.stat_result) -> str:
    """Complains of others who can write."""
    if sys.platform == "win32" or not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return ""
    return f"others than its owner can write to it (mode {stat.S_IMODE(state.st_mode):04o})"


def _others(state: os.stat_result) -> str:
    return _owner(state) or open_to_others(state)


def read_file(path: Path) -> bytes:
    """The content of a regular file. A pipe or a device, which could keep a reader waiting for ever, is refused.

    Raises:
        UntrustedError: others can write to it or to its folder.
        OSError: it cannot be read, or is no regular file.
    """
    if folder := distrust(path.parent):
        raise folder.error()
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if reason := _others(state):
            raise Distrust(path, reason).error()
        return file.read()


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that nobody ever sees half written, and none but the user reads; its folder is made where it is missing.

    Raises:
        UntrustedError: others can write to its folder.
        OSError: it cannot be written; what was there before is left.
    """
    for place in (*reversed([place for place in path.parent.parents if not place.exists()]), path.parent):
        place.mkdir(mode=0o700, exist_ok=True)
    if folder := distrust(path.parent):
        raise folder.error()
    handle, temporary = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # what went wrong before is what must be heard of
            os.unlink(temporary)
        raise
