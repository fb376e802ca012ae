"""Configs that must not be chosen: those that failed on this machine while they were tuned, and those that plugins warn of.

No tier but a user's own `cfg=` and overlays chooses such a config; the next best takes its place and `explain` says so. What
failed here is kept in the user's cache, one file per call and config, so that processes that find different failures of one
call lose none. It holds for the versions of jaxlib, of the plugin and of what the plugin compiles with, as an upgrade of one
of them may be the cure.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ejkernel._plugins import requirements as _requirements
from ejkernel._plugins.records import Candidate
from ejkernel._plugins.registry import kernel_registry
from ejkernel.call.arrays import ArraySpec
from ejkernel.call.request import Request
from ejkernel.configs import store as _store
from ejkernel.configs.key import Key, canonical_json
from ejkernel.configs.spaces import describe, knobs, to_plain
from ejkernel.errors import NoConfigError
from ejkernel.plugin import Phase, Quarantine
from ejkernel.utils.cache_folder import cache_folder, distrust, read_file, usable
from ejkernel.utils.warn_once import warn_once

FORMAT = "ejkernel quarantined config"
LEVEL = 1

_COMPARISON = re.compile(r"\s*(<=|>=|==|!=|<|>)\s*(-?\d+(?:\.\d+)?)\s*")


class QuarantinedError(NoConfigError):
    """Every config of an implementation is quarantined for a call, so that another implementation must run it."""


@dataclasses.dataclass(frozen=True)
class Quarantined:
    """One config that raised, or gave wrong numbers, when it was tuned on this machine.

    Attributes:
        key: the call and what runs it.
        config: the knobs by name; None for an implementation without knobs.
        reason: what happened.
        versions: of jaxlib, the plugin and what it compiles with; under others it is not in force.
        time: when that was, in UTC.
    """

    key: Key
    config: Mapping[str, Any] | None = dataclasses.field(hash=False)
    reason: str
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    time: str = ""

    @classmethod
    def of(cls, key: Key, candidate: Candidate, config: Any, reason: str) -> Quarantined:
        """The record of something that happened just now."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return cls(key, to_plain(config), reason, dict(compiling_versions(candidate)), now)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**values, "key": self.key.to_dict(), "versions": dict(self.versions)}

    @classmethod
    def from_dict(cls, values: Any) -> Quarantined:
        """Read what `to_dict` wrote; ValueError if it is something else."""
        try:
            found = cls(Key.from_dict(values["key"]), *(values[name] for name in ("config", "reason", "versions", "time")))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a quarantined config: {type(error).__name__}: {error}") from error
        texts = isinstance(found.reason, str) and isinstance(found.time, str)
        if not (texts and isinstance(found.config, (dict, type(None))) and isinstance(found.versions, dict)):
            raise ValueError("not a quarantined config: a field of another type")
        return found


def directory() -> Path:
    """Where this machine's quarantine is: one folder per key, one file per config in it."""
    return cache_folder() / f"quarantine-{LEVEL}"


def add(records: Iterable[Quarantined]) -> None:
    """Keep records, from now on and in later processes. What cannot be written holds for this process, with one warning."""
    for record in records:
        text = json.dumps({"format": FORMAT, "level": LEVEL, **record.to_dict()}, indent=1, sort_keys=True) + "\n"
        folder, digest = directory() / record.key.digest, _digest(record.config)
        if not _store.write(folder, digest, text):
            _unwritten.setdefault(folder, {})[digest] = record
    kernel_registry.refresh()


def lift(key: Key, config: Any) -> None:
    """Forget what was recorded about one config."""
    folder, digest = directory() / key.digest, _digest(to_plain(config))
    _unwritten.get(folder, {}).pop(digest, None)
    if usable(folder):
        (folder / f"{digest}.json").unlink(missing_ok=True)
    kernel_registry.refresh()


def forget_unwritten() -> None:
    """Drop what is only kept in this process."""
    _unwritten.clear()


def files() -> Iterator[Path]:
    """Every file of the quarantine, in order."""
    for folder in folders():
        yield from _store.files(folder)


def folders() -> list[Path]:
    """The folders of keys."""
    found = directory()
    return sorted(path for path in found.iterdir() if path.is_dir()) if found.is_dir() and not distrust(found) else []


def read(path: Path) -> Quarantined:
    """The record in one file.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds something else.
    """
    try:
        document = json.loads(read_file(path).decode("utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(document, dict) or (document.get("format"), document.get("level")) != (FORMAT, LEVEL):
        raise ValueError(f"not {FORMAT!r} of level {LEVEL}")
    record = Quarantined.from_dict(document)
    if (path.parent.name, path.stem) != (record.key.digest, _digest(record.config)):
        raise ValueError("holds the record of another config")
    return record


def compiling_versions(candidate: Candidate) -> Mapping[str, str]:
    """The installed versions that decide what machine code a config becomes."""
    return _versions(candidate.distribution, candidate.platform, kernel_registry.epoch)


class QuarantineFilter:
    """The quarantine as it concerns one phase of one call on one implementation.

    Attributes:
        met: the configs that were refused so far, as `<config>: <reason>`.
    """

    def __init__(self, request: Request, phase: Phase, candidate: Candidate, key: Key | None) -> None:
        self._shipped = [
            record
            for record in _shipped(candidate, phase, kernel_registry.epoch)
            if _speaks_of(record, request.call, request.target)
        ]
        self._own = {} if key is None else _own(key, compiling_versions(candidate))
        self._name = describe(candidate)
        self.met: list[str] = []

    def reason(self, config: Any, *, found_here: bool = True) -> str | None:
        """Why a config must not be chosen; None if it may. Without `found_here` only the plugin is asked."""
        if found_here and self.is_own(config):
            return self._own[_digest(to_plain(config))].reason
        return next((record.reason for record in self._shipped if _all_met(record.config, config)), None)

    def is_own(self, config: Any) -> bool:
        """Whether it is this machine that found it to fail."""
        return bool(self._own) and _digest(to_plain(config)) in self._own

    def admits(self, config: Any) -> bool:
        """Whether a config may be chosen; if not, that is noted."""
        reason = self.reason(config)
        if reason is not None:
            self.met.append(f"{config}: {reason}")
        return reason is None

    def nothing_left(self) -> QuarantinedError:
        """What is raised where every config was refused."""
        few = "; ".join(self.met[:3]) + (f"; and {len(self.met) - 3} more" if len(self.met) > 3 else "")
        remedy = "run one all the same with cfg=" + (
            ", or forget this with `ejkernel cache clear --quarantine`" if self._own else ""
        )
        return QuarantinedError(f"{self._name}: every config is quarantined: {few}; {remedy}")


_unwritten: dict[Path, dict[str, Quarantined]] = {}
"""What could not be written, by the folder where it should be."""


def _digest(config: Mapping[str, Any] | None) -> str:
    return hashlib.sha256(canonical_json(None if config is None else dict(config)).encode()).hexdigest()


def _own(key: Key, versions: Mapping[str, str]) -> dict[str, Quarantined]:
    folder = directory() / key.digest
    known = {**_on_disk(folder, kernel_registry.epoch), **_unwritten.get(folder, {})}
    return {digest: record for digest, record in known.items() if record.key == key and record.versions == versions}


@functools.lru_cache(maxsize=4096)
def _on_disk(folder: Path, epoch: int) -> Mapping[str, Quarantined]:
    """What a folder holds, read once per registry epoch. A file that cannot be read is left out, with one warning."""
    found = {}
    try:
        paths = [*_store.files(folder)] if usable(folder) else []
    except OSError as error:
        warn_once(folder, f"the quarantine cannot be read ({error.strerror or error}); going on without it")
        return {}
    for path in paths:
        try:
            found[path.stem] = read(path)
        except FileNotFoundError:  # lifted by another process, or not to be trusted
            continue
        except (OSError, ValueError) as error:
            warn_once(path, f"ignored: {error}; delete it or run `ejkernel cache clear --quarantine`")
    return found


@functools.lru_cache(maxsize=256)
def _versions(distribution: str, platform: str, epoch: int) -> Mapping[str, str]:
    records = (record for record in kernel_registry.records if record.ok and record.name == platform)
    compilers = [name for record in records if record.plugin is not None for name in record.plugin.versions]
    found = {name: _requirements.installed_version(name) for name in ("jaxlib", distribution, *compilers)}
    return {name: version for name, version in found.items() if version is not None}


@functools.lru_cache(maxsize=1024)
def _shipped(candidate: Candidate, phase: Phase, epoch: int) -> tuple[Quarantine, ...]:
    """What a plugin says of its own implementation under the installed versions."""
    own = (candidate.implementation.operation, candidate.implementation.variant)
    return tuple(
        quarantine
        for record in kernel_registry.records
        if record.ok and record.name == candidate.platform
        for quarantine in record.quarantine
        if (quarantine.operation, quarantine.variant) == own and quarantine.phase in (None, phase) and _installed(quarantine)
    )


def _installed(quarantine: Quarantine) -> bool:
    found = {name: _requirements.installed_version(name) for name in quarantine.versions}
    return all(
        version is not None and _requirements.admits(quarantine.versions[name], version) for name, version in found.items()
    )


def _speaks_of(quarantine: Quarantine, call: Any, target: Any) -> bool:
    capability = target.compute_capability if target.capability is not None else None
    if quarantine.capability and (capability is None or not _requirements.admits(quarantine.capability, capability)):
        return False
    return _all_met(quarantine.call, call)


def _all_met(wanted: Mapping[str, Any], holder: Any) -> bool:
    return all(hasattr(holder, name) and _is_met(getattr(holder, name), value) for name, value in wanted.items())


def _is_met(value: Any, wanted: Any) -> bool:
    value = value.dtype if isinstance(value, ArraySpec) else value
    if isinstance(wanted, str) and type(value) in (int, float):
        clauses = [_COMPARISON.fullmatch(clause) for clause in wanted.split(",")]
        return all(clause is not None and _requirements.COMPARE[clause[1]](value, float(clause[2])) for clause in clauses)
    return value == wanted or (isinstance(wanted, tuple) and value in wanted)


def distance(config: Any, other: Any) -> float:
    """Octaves between numbers, and one for every other knob that differs."""
    pairs = [(getattr(config, name), getattr(other, name)) for name in knobs(type(config))]
    return sum(abs(math.log2(a / b)) if type(a) is type(b) is int and a > 0 and b > 0 else float(a != b) for a, b in pairs)
