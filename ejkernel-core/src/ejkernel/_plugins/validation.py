"""Is what a plugin says about itself well formed? Each function returns the complaint in the user's words, or None."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ejkernel._plugins import requirements as _requirements
from ejkernel.plugin import API_LEVEL, SUPPORTED_API_LEVELS, ConfigSpace, Implementation, OperationPack, Plugin, Quarantine

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_PLATFORM = re.compile(r"[a-z][a-z0-9_-]*")
_VARIANT = re.compile(r"[a-z0-9][a-z0-9_-]*")
_BACKENDS = ("any", "cpu", "gpu", "tpu")
_PARTITIONING = ("native", "opaque")
_RESERVED = ("auto", "any")


def platform_name(name: str) -> str | None:
    """The entry point's name becomes the platform's name, which users write and settings are split around."""
    if name in _RESERVED:
        return f"the entry point's name {name!r} is reserved"
    if not _PLATFORM.fullmatch(name):
        return f"the entry point's name {name!r} must be lower case letters, digits, '_' and '-', beginning with a letter"
    return None


def plugin(answer: Any, name: str) -> str | None:
    """The answer of `ejkernel_plugin`, as far as every API level has it."""
    if not isinstance(answer, Plugin):
        return f"ejkernel_plugin() returned {type(answer).__name__}, expected ejkernel.plugin.Plugin"
    if answer.name != name:
        return f"it calls itself {answer.name!r}, and its entry point says {name!r}"
    if not isinstance(answer.api_level, int) or isinstance(answer.api_level, bool):
        return f"api_level: got {answer.api_level!r}, expected an int such as {API_LEVEL}"
    return None


def pack(answer: Any, name: str) -> str | None:
    """The answer of `ejkernel_operations`."""
    if not isinstance(answer, OperationPack):
        return f"ejkernel_operations() returned {type(answer).__name__}, expected ejkernel.plugin.OperationPack"
    if answer.name != name:
        return f"it calls itself {answer.name!r}, and its entry point says {name!r}"
    if not isinstance(answer.api_level, int) or isinstance(answer.api_level, bool):
        return f"api_level: got {answer.api_level!r}, expected an int such as {API_LEVEL}"
    for field in ("operations", "functions"):
        value = getattr(answer, field)
        if not isinstance(value, str) or not (_MODULE.fullmatch(value) or (field == "functions" and not value)):
            return f"{field}: got {value!r}, expected the name of a package such as 'acme.operations'"
    return None


def names_of_pack(answer: OperationPack, operations: Sequence[str], functions: Sequence[str]) -> str | None:
    """What it brings: at least one operation, each by a name that users can write."""
    if not operations:
        return f"operations: {answer.operations!r} has no folder with an interface.py"
    wrong = [name for name in (*operations, *functions) if not name.isidentifier() or name.startswith("_")]
    return f"it brings {wrong[0]!r}, expected a public name" if wrong else None


def api_level(level: int, distribution: str) -> str | None:
    """Core accepts a window of levels; outside of it, whichever side is older must be upgraded."""
    if level in SUPPORTED_API_LEVELS:
        return None
    low, high = SUPPORTED_API_LEVELS[0], SUPPORTED_API_LEVELS[-1]
    window = str(low) if low == high else f"{low} to {high}"
    older = "ejkernel-core" if level > high else distribution
    return f"it is written for plugin API level {level}, this ejkernel accepts {window}; pip install --upgrade {older}"


def contents(answer: Plugin) -> str | None:
    """Everything else in the answer of `ejkernel_plugin`."""
    if not isinstance(answer.summary, str):
        return f"summary: got {answer.summary!r}, expected a string"
    if not _is_strings(answer.requires):
        return f"requires: got {answer.requires!r}, expected a tuple of import names"
    if not isinstance(answer.versions, Mapping) or not _is_strings((*answer.versions, *answer.versions.values())):
        return f"versions: got {answer.versions!r}, expected a mapping of distribution name to specifier"
    if not _is_strings(answer.custom_calls):
        return f"custom_calls: got {answer.custom_calls!r}, expected a tuple of names of custom calls"
    if not isinstance(answer.implementations, tuple):
        return f"implementations: got {type(answer.implementations).__name__}, expected a tuple"
    for number, record in enumerate(answer.implementations):
        if not isinstance(record, Implementation):
            return f"implementations[{number}]: got {type(record).__name__}, expected ejkernel.plugin.Implementation"
        complaint = implementation(record)
        if complaint:
            return f"implementations[{number}] ({record.operation!r}): {complaint}"
    return _duplicates(answer.implementations)


def implementation(record: Implementation) -> str | None:
    """One implementation, of a plugin or registered at run time."""
    choices = (("phase", record.phase, ("forward", "backward")), ("partitioning", record.partitioning, _PARTITIONING))
    for field, value, expected in choices:
        if value not in expected:
            return f"{field}: got {value!r}, expected one of {', '.join(expected)}"
    if not isinstance(record.operation, str) or not record.operation.isidentifier():
        return f"operation: got {record.operation!r}, expected a name such as 'flash_attention'"
    if not _is_strings(record.backends) or not record.backends or not set(record.backends) <= set(_BACKENDS):
        return f"backends: got {record.backends!r}, expected a tuple of {', '.join(_BACKENDS)}"
    if not isinstance(record.variant, str) or (record.variant and not _VARIANT.fullmatch(record.variant)):
        return f"variant: got {record.variant!r}, expected lower case letters, digits, '_' and '-'"
    for field in ("priority", "version", "contract"):
        if not isinstance(getattr(record, field), int):
            return f"{field}: got {getattr(record, field)!r}, expected an int"
    if not isinstance(record.plain_jax, bool):
        return f"plain_jax: got {record.plain_jax!r}, expected True or False"
    return _references(record) or _kept(record) or _accepted(record)


def _kept(record: Implementation) -> str | None:
    """Lowered code that is kept can be neither differentiated nor partitioned."""
    if record.lowered_from is None or not (record.plain_jax or record.partitioning == "native"):
        return None
    field = "plain_jax=True" if record.plain_jax else "partitioning='native'"
    return f"lowered_from: got {record.lowered_from!r} with {field}, expected None: such code is traced in every program"


def _accepted(record: Implementation) -> str | None:
    """Which optional fields of a call it honours; whether there are such fields is for the conformance suite to find out."""
    for field, names in (("accepts", record.accepts or ()), ("without", record.without)):
        if not _is_strings(names) or not all(name.isidentifier() for name in names):
            return f"{field}: got {names!r}, expected a tuple of names of the call's fields"
    if record.contract < 1:
        return f"contract: got {record.contract}, expected the number of a revision, from 1"
    if record.accepts is not None and (record.contract != 1 or record.without):
        return f"accepts: got {record.accepts!r} beside contract or without, expected None: it says all that they say"
    return None


def _references(record: Implementation) -> str | None:
    for field in ("target", "supports", "configs", "lowered_from"):
        value = getattr(record, field)
        if isinstance(value, str):
            if not _REFERENCE.fullmatch(value):
                return f"{field}: got {value!r}, expected 'package.module:attribute'"
        elif value is None and field != "target":
            continue
        elif not (isinstance(value, ConfigSpace) if field == "configs" else callable(value)):
            return f"{field}: got {type(value).__name__}, expected 'package.module:attribute' or the object itself"
    return None


def _duplicates(implementations: Sequence[Implementation]) -> str | None:
    seen: dict[tuple[str, str, str], set[str]] = {}
    for record in implementations:
        taken = seen.setdefault((record.operation, record.phase, record.variant), set())
        if taken and ({"any"} & {*taken, *record.backends} or taken & {*record.backends}):
            named = f"variant {record.variant!r}" if record.variant else "no variant"
            backends = "/".join(record.backends)
            return f"two implementations of {record.operation} ({record.phase}) on {backends} with {named}; give one a variant"
        taken |= {*record.backends}
    return None


def tables(answers: Sequence[Any]) -> tuple[tuple[str, ...], str | None]:
    """The paths that `ejkernel_tuned_configs` answered, or a complaint. The files themselves are not touched."""
    paths = answers[0] if answers else ()
    if isinstance(paths, (str, bytes)) or not isinstance(paths, Sequence):
        return (), f"ejkernel_tuned_configs() returned {type(paths).__name__}, expected a list of paths"
    if not all(isinstance(path, (str, os.PathLike)) for path in paths):
        return (), f"ejkernel_tuned_configs() returned {paths!r}, expected a list of paths"
    return tuple(os.fspath(path) for path in paths), None


def quarantine(answers: Sequence[Any], owner: Plugin) -> tuple[tuple[Quarantine, ...], str | None]:
    """The records that `ejkernel_quarantined_configs` answered, or a complaint."""
    records = answers[0] if answers else ()
    if isinstance(records, (str, bytes)) or not isinstance(records, Sequence):
        return (), f"ejkernel_quarantined_configs() returned {type(records).__name__}, expected a list of Quarantine"
    known = {(record.operation, record.variant) for record in owner.implementations}
    for number, record in enumerate(records):
        if not isinstance(record, Quarantine):
            complaint = f"got {type(record).__name__}, expected ejkernel.plugin.Quarantine"
        elif (record.operation, record.variant) not in known:
            complaint = f"{record.operation!r} with variant {record.variant!r} is not an implementation of this plugin"
        else:
            complaint = _quarantined(record)
        if complaint:
            return (), f"ejkernel_quarantined_configs()[{number}]: {complaint}"
    return tuple(records), None


def _quarantined(record: Quarantine) -> str | None:
    if not isinstance(record.reason, str) or not record.reason:
        return f"reason: got {record.reason!r}, expected what goes wrong with these configs"
    if record.phase not in (None, "forward", "backward"):
        return f"phase: got {record.phase!r}, expected 'forward', 'backward' or None"
    for field in ("config", "call", "versions"):
        if not isinstance(getattr(record, field), Mapping):
            return f"{field}: got {type(getattr(record, field)).__name__}, expected a mapping"
    for specifier in (*record.versions.values(), record.capability):
        if not isinstance(specifier, str):
            return f"got the specifier {specifier!r}, expected a string"
        try:
            _requirements.admits(specifier or ">=0", "0")
        except ValueError as error:
            return f"got the specifier {specifier!r}: {error}"
    return None


def _is_strings(values: Any) -> bool:
    return isinstance(values, tuple) and all(isinstance(value, str) for value in values)
