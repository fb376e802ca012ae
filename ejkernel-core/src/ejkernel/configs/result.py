"""What tuning found: entries that can be put in force, merged and kept as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from pathlib import Path
from types import TracebackType

from ejkernel.call.policy import use
from ejkernel.configs import memory as _memory
from ejkernel.configs.entry import Entry, dump_entries, load_entries, require_verified
from ejkernel.configs.key import Key
from ejkernel.configs.store import USER_CACHE


class _Open(threading.local):
    def __init__(self) -> None:
        self.blocks: list[contextlib.AbstractContextManager[object]] = []


_open = _Open()


@dataclasses.dataclass(frozen=True)
class KeyedConfigs:
    """Configs of exact calls. As a line of an overlay it answers for these, and nothing is asked of how they were found."""

    entries: tuple[Entry, ...] = ()

    @functools.cached_property
    def _by_key(self) -> dict[Key, Entry]:
        return {entry.key: entry for entry in self.entries}

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.entries)

    def __hash__(self) -> int:
        # Asked for at every call of a compiled program inside the block.
        return self._hash

    def lookup(self, key: Key) -> Entry | None:
        """The entry of exactly this key."""
        return self._by_key.get(key)


@dataclasses.dataclass(frozen=True)
class AutotuningResult(KeyedConfigs):
    """Tuned configs of a program. `with result:` puts them in force, `result | other` merges (the right one wins).

    Attributes:
        entries: one per key; each was checked against the reference.

    Raises:
        ValueError: an entry has no check that passed, or two have one key.
    """

    __hash__ = KeyedConfigs.__hash__

    def __post_init__(self) -> None:
        for entry in self.entries:
            require_verified(entry)
        if len(self._by_key) != len(self.entries):
            raise ValueError("AutotuningResult: got two entries of one key, expected one; merge results with |")

    def __or__(self, other: AutotuningResult) -> AutotuningResult:
        if not isinstance(other, AutotuningResult):
            return NotImplemented
        return AutotuningResult(tuple({**self._by_key, **other._by_key}.values()))

    def __enter__(self) -> AutotuningResult:
        block = use(overlay=(("", self),))
        block.__enter__()
        _open.blocks.append(block)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        _open.blocks.pop().__exit__(kind, error, traceback)

    def remember(self) -> None:
        """Put the entries in force for the rest of the process."""
        _memory.remember(*self.entries)

    def store(self) -> int:
        """Write the entries to the user's cache; how many could be written."""
        return sum(USER_CACHE.store(entry) for entry in self.entries)

    def dumps(self) -> str:
        """As JSON."""
        return dump_entries(self.entries)

    @classmethod
    def loads(cls, text: str) -> AutotuningResult:
        """Read what `dumps` wrote; ValueError if it is something else."""
        return cls(load_entries(text))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `dumps()` to a file."""
        Path(path).write_text(self.dumps(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AutotuningResult:
        """Read what `save` wrote; ValueError, naming the file, if it is something else."""
        try:
            return cls.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error
