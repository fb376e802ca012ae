"""Complaints about the cache, each once."""

from __future__ import annotations

import threading
import warnings

from ejkernel.errors import CacheWarning

_lock = threading.Lock()
_said: set[str] = set()


def warn_once(about: object, message: str) -> None:
    """Issue a `CacheWarning` the first time that something (a file, a directory, a type) gives cause for one."""
    with _lock:
        if str(about) in _said:
            return
        _said.add(str(about))
    warnings.warn(f"{about}: {message}", CacheWarning, stacklevel=2)
