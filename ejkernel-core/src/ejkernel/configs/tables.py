"""Tuning tables that plugins ship: exact calls first, then the nearest of the same bucket.

What was fastest for one length says little about another ten times as long, where the heuristic still holds: a near call has
every size within a factor of two.

A third party's table speaks only of its own implementations and never chooses the platform, as its kernels are opt-in. A config
of a near call is used only if the implementation's search space for the call at hand contains it, as that is the one place
where an implementation says which configs are legal for a call. Which platform is fastest is never taken over from a near call.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

from ejkernel._plugins.catalog import OPERATIONS, operation_module
from ejkernel._plugins.registry import kernel_registry
from ejkernel.configs.entry import Entry, load_entries
from ejkernel.configs.key import Key
from ejkernel.utils.warn_once import warn_once


@dataclasses.dataclass(frozen=True)
class _Index:
    exact: dict[Key, Entry]
    buckets: dict[Key, list[Entry]]
    choices: dict[Key, Entry]


@functools.lru_cache(maxsize=128)
def _index(tables: tuple[tuple[str, str, bool], ...], operation: str) -> _Index:
    """What tables say of an operation; older ones know former names of fields, and not the later ones. Those of
    `ejkernel.ops.Kernel` have no contract."""
    index, known = _Index({}, {}, {}), operation in OPERATIONS
    contract = operation_module(operation, "interface").OPERATION if known else None
    for path, platform, first_party in tables:
        for entry in _read(path):
            if entry.key.operation != operation:
                continue
            key = entry.key
            if contract is not None:
                key = key.with_present_names(dict(contract.renamed)).with_later_fields(contract)
            entry = dataclasses.replace(entry, key=key)
            if first_party or key.implementation.partition(".")[0] == platform:
                if key.released not in index.exact:
                    index.buckets.setdefault(key.bucket, []).append(entry)
                index.exact.setdefault(key.released, entry)
            if first_party:
                index.choices.setdefault(key.released, entry)
    return index


@functools.lru_cache(maxsize=16)
def _read(path: str) -> tuple[Entry, ...]:
    try:
        return load_entries(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        warn_once(path, f"tuning table ignored: {error}")
        return ()


def _current(operation: str) -> _Index:
    records = (record for record in kernel_registry.records if record.ok)
    return _index(tuple((path, record.name, record.first_party) for record in records for path in record.tables), operation)


def lookup(key: Key) -> Entry | None:
    """The shipped entry of this very call."""
    return _current(key.operation).exact.get(key.released)


def choice(key: Key) -> Entry | None:
    """The shipped entry of this very call whose word on the fastest platform counts."""
    return _current(key.operation).choices.get(key.released)


def nearest(key: Key) -> list[Entry]:
    """The shipped entries of calls that differ in sizes only, none by a factor of two or more; the nearest first."""
    buckets = _current(key.operation).buckets
    if not buckets:
        return []
    found = [(key.distance(entry.key), entry.key.call, entry) for entry in buckets.get(key.bucket, ())]
    return [entry for distance, _, entry in sorted(found, key=lambda each: each[:2]) if distance < math.inf]
