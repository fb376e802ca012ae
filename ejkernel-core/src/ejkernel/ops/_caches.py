"""The stores of tuned configs, which are those that the dispatcher reads, and overlays over them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from ejkernel import tuning
from ejkernel.call.policy import use
from ejkernel.configs.store import USER_CACHE
from ejkernel.errors import wrong_type
from ejkernel.ops._kernel import IMPLEMENTATION, Invocation, KernelDefinition
from ejkernel.tuning import Entry, Key


class ConfigCache:
    """This process's tuned configs: the tier "memory". All objects of this class show the same store.

    Only entries whose config was checked against the reference are taken; a config of one's own is put in force with
    `overlay_cache` or `cfg=`.
    """

    def get(self, call: Key | Invocation) -> Entry | None:
        """The entry of exactly this call."""
        key = _as_key(call)
        return next((entry for entry in tuning.remembered() if entry.key == key), None)

    def put(self, *entries: Entry) -> None:
        """Use these for the rest of the process; programs compiled before are traced again.

        Raises:
            ValueError: an entry has no check that passed; then none is taken.
        """
        tuning.remember(*entries)

    def keys(self) -> tuple[Key, ...]:
        """What there is an entry of."""
        return tuple(entry.key for entry in tuning.remembered())

    def size(self) -> int:
        """How many entries there are."""
        return len(self.keys())

    def clear(self, operation: str | None = None) -> int:
        """Drop the entries, or those of one operation; how many there were."""
        keys = [key for key in self.keys() if operation in (None, key.operation)]
        tuning.forget(keys)
        return len(keys)


class PersistentCache:
    """The user's tuned configs on disk, in `EJKERNEL_CACHE_DIR`: the tier "persistent". All objects show the same store."""

    @property
    def path(self) -> Path:
        """Its directory, which need not exist."""
        return tuning.cache_info().directory

    def get(self, call: Key | Invocation) -> Entry | None:
        """The entry of exactly this call."""
        return USER_CACHE.lookup(_as_key(call))

    def put(self, entry: Entry) -> bool:
        """Write an entry; whether that could be done.

        Raises:
            ValueError: it has no check that passed.
        """
        return tuning.store(entry)

    def keys(self) -> tuple[Key, ...]:
        """What there is a readable entry of, also of other versions of jax and ejkernel."""
        return tuple(file.entry.key for file in tuning.cache_entries() if file.entry is not None)

    def size(self) -> int:
        """How many files there are."""
        return tuning.cache_info().count

    def clear(self, operation: str | None = None) -> int:
        """Delete the entries, or those of one operation; how many there were."""
        return tuning.clear_cache(operation)

    def export(self, path: str | os.PathLike[str]) -> int:
        """Write all entries to one file; how many there were."""
        return tuning.export_cache(path)

    def merge(self, path: str | os.PathLike[str]) -> int:
        """Take entries of an exported file that this cache lacks; how many were written."""
        return tuning.merge_cache(path)


@contextlib.contextmanager
def overlay_cache(configs: Mapping[Any, Any]) -> Generator[None]:
    """Run calls inside the `with` block with these configs. Nothing is written anywhere.

    Args:
        configs: from a `Kernel`, an `Invocation` or its key, or a name as in `ejkernel.overlay`, to the config dataclass; for
            a kernel or a name also a mapping of some of its fields. An exact call goes before a name.

    Raises:
        TypeError: another kind of key or config.
        ValueError: an unknown name.
    """
    if not isinstance(configs, Mapping):
        raise wrong_type("overlay_cache", repr(configs), "a mapping from calls or operations to configs")
    named = {name: config for name, config in configs.items() if isinstance(name, str)}
    exact: list[Entry] = []
    kernels: list[tuple[str, Any]] = []
    for key, config in configs.items():
        if isinstance(key, KernelDefinition):
            kernels.append((f"{key.op_id}/{IMPLEMENTATION}", tuning.as_setting(f"overlay_cache[{key.op_id}]", config)))
        elif isinstance(key, (Key, Invocation)):
            exact.append(Entry(_as_key(key), tuning.to_plain(config), tier="overlay"))
        elif not isinstance(key, str):
            raise wrong_type("overlay_cache", repr(key), "a Kernel, an Invocation or its key, or the name of an operation")
    lines = [("", tuning.KeyedConfigs(tuple(exact))), *kernels]
    with tuning.overlay(named), use(overlay=lines):
        yield


def _as_key(call: Any) -> Key:
    if isinstance(call, Invocation):
        return call.key()
    if not isinstance(call, Key):
        raise wrong_type("call", repr(call), "an Invocation, or its key()")
    return call
