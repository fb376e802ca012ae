"""The user's cache folder, and how a file is put there in one step."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import tempfile
from pathlib import Path


@functools.cache
def _default_directory() -> str:
    import platformdirs

    return platformdirs.user_cache_dir("ejkernel")


def cache_folder() -> Path:
    """`EJKERNEL_CACHE_DIR`, or the platform's cache directory. It need not exist."""
    return Path(os.environ.get("EJKERNEL_CACHE_DIR") or _default_directory()).expanduser()


def read_file(path: Path) -> bytes:
    """The content of a regular file. A pipe or a device, which could keep a reader waiting for ever, is refused.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that nobody ever sees half written; its folder is made where it is missing.

    Raises:
        OSError: it cannot be written; what was there before is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
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
