"""Complaints that are made once in a process."""

from __future__ import annotations

import threading

from ejkernel.errors import CacheWarning, warn

_lock = threading.Lock()
_said: set[str] = set()


def warn_once(about: object, message: str, category: type[Warning] = CacheWarning) -> None:
    """Warn the first time that something (a file, a directory, a type, an argument) gives cause for it."""
    with _lock:
        if str(about) in _said:
            return
        _said.add(str(about))
    warn(f"{about}: {message}", category)
