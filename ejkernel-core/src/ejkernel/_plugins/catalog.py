"""What operations there are, by name, with their parts and public functions: those of every pack that discovery found.

Names come from folders and from what modules say of themselves, so that no list repeats them. No operation and no facade is
imported to find out.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ejkernel._plugins.records import Candidate, PluginRecord
from ejkernel.errors import invalid, suggestion
from ejkernel.plugin import OperationPack, resolve

_ALL = re.compile(r"^__all__ = \[(.*?)\]", re.MULTILINE | re.DOTALL)
_PUBLIC = re.compile(r"^@public\(([^()]*)\)\n(?:@[^\n]*\n)*def (\w+)", re.MULTILINE)
_OTHER_NAME = re.compile(r"^(\w+) = (\w+)$", re.MULTILINE)
_NO_DISPATCH = "dispatches=False"


class _Names(NamedTuple):
    """Public names of a pack's facades and the module of each: functions that dispatch, other functions, everything."""

    functions: Mapping[str, str]
    helpers: Mapping[str, str]
    all: Mapping[str, str]


class _View(Mapping[str, str]):
    """A mapping that is what discovery found last."""

    def __init__(self, read: Callable[[], Mapping[str, str]]) -> None:
        self._read = read

    def __getitem__(self, name: str) -> str:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __repr__(self) -> str:
        return f"<{len(self)} names: {', '.join(self)}>"


class _Catalog:
    """The packs that discovery found, and what follows from them."""

    def __init__(self) -> None:
        self.load(())

    def load(self, records: Iterable[PluginRecord]) -> None:
        """Take over the outcome of discovery, in place of an earlier one."""
        self.records = tuple(records)
        packs = [(record, record.pack) for record in self.records if record.ok and record.pack is not None]
        self.bringers = {name: record for record, _ in packs for name in record.operations}
        self.packages = {name: f"{pack.operations}.{name}" for record, pack in packs for name in sorted(record.operations)}
        self._names: _Names | None = None
        _names_in.cache_clear()
        _default_order.cache_clear()

    @property
    def names(self) -> _Names:
        """What the facades define; read when it is asked for."""
        if self._names is None:
            packs = (record.pack for record in self.records if record.ok)
            found = [_names_in(pack.functions) for pack in packs if pack is not None and pack.functions]
            self._names = _Names(*(_merged(kind) for kind in zip(_Names({}, {}, {}), *found, strict=True)))
        return self._names


def packs() -> tuple[PluginRecord, ...]:
    """Every pack of operations that was found, whatever became of it."""
    return _catalog.records


def operation_module(operation: str, part: str) -> Any:
    """A part of an operation's folder: its `interface`, `reference`, `cases` or `order`.

    Raises:
        ValueError: there is no such operation; the message suggests a close name.
        ModuleNotFoundError: it has no such part.
    """
    if operation not in OPERATIONS:
        names = f"one of {', '.join(OPERATIONS)}" + suggestion(operation, OPERATIONS)
        raise invalid("operation", repr(operation), names)
    return importlib.import_module(f"{OPERATIONS[operation]}.{part}")


def default_order(operation: str) -> Mapping[str, Mapping[str, Any]]:
    """Backend -> implementation or platform -> where it stands, a number or a rule; empty where nothing was measured."""
    return _default_order(OPERATIONS[operation]) if operation in OPERATIONS else {}


def is_stranger(candidate: Candidate) -> bool:
    """Whether it is a third party's code for another's operation, which runs only where it is asked for."""
    if candidate.origin != "third-party":
        return False
    bringer = _catalog.bringers.get(candidate.implementation.operation)
    return bringer is None or bringer.distribution != candidate.distribution


def public_function(name: str) -> Callable[..., Any]:
    """The public function of this name.

    Raises:
        ValueError: there is none; the message suggests a close name.
    """
    if name not in FUNCTIONS:
        plain = "; that one is the same on every platform" if name in HELPERS else suggestion(name, FUNCTIONS)
        raise invalid("operation", repr(name), "the name of a public function that platforms implement" + plain)
    return resolve(f"{FUNCTIONS[name]}:{name}")


def functions_in(home: str) -> tuple[str, ...]:
    """The public functions whose modules lie in one package."""
    return tuple(name for name, module in FUNCTIONS.items() if module.startswith(f"{home}."))


def operations_in(package: str) -> tuple[str, ...]:
    """The operations of a package: its folders with an `interface.py`. Imports what contains the package."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    if not places:
        raise ModuleNotFoundError(f"no package {package!r}", name=package)
    return tuple(sorted(path.parent.name for place in places for path in Path(place).glob("*/interface.py")))


def public_names(pack: OperationPack) -> tuple[str, ...]:
    """The public names of a pack's facades."""
    return tuple(_names_in(pack.functions).all) if pack.functions else ()


@functools.cache
def _default_order(package: str) -> Mapping[str, Mapping[str, Any]]:
    known = importlib.util.find_spec(f"{package}.order") is not None
    return resolve(f"{package}.order:ORDER") if known else MappingProxyType({})


def _merged(mappings: Iterable[Mapping[str, str]]) -> Mapping[str, str]:
    return dict(sorted((name, module) for mapping in mappings for name, module in mapping.items()))


@functools.cache
def _names_in(home: str) -> _Names:
    """What a module, or each module of a package, says of itself in `__all__` and by `@public`."""
    spec = importlib.util.find_spec(home)
    if spec is None:
        raise ModuleNotFoundError(f"no module {home!r}", name=home)
    modules = {home: spec.loader}
    if spec.submodule_search_locations is not None:
        modules = {}
        for finder, name, is_package in pkgutil.iter_modules(spec.submodule_search_locations, f"{home}."):
            if not is_package and not name.rpartition(".")[2].startswith("_"):
                found = finder.find_spec(name, None)
                modules[name] = found.loader if found is not None else None
    functions, helpers, everything = {}, {}, {}
    for module, loader in modules.items():
        listed, dispatching = _said_by(module, loader)
        everything.update(dict.fromkeys(listed, module))
        functions.update({name: module for name, dispatches in dispatching.items() if dispatches and name in listed})
        helpers.update({name: module for name in listed if name.islower() and not dispatching.get(name)})
    return _Names(functions, helpers, everything)


def _said_by(module: str, loader: Any) -> tuple[tuple[str, ...], Mapping[str, bool]]:
    """The names in `__all__` of a module, and its public functions, of which each dispatches or does not; from its source."""
    source = loader.get_source(module) if hasattr(loader, "get_source") else None
    if source is None:  # a program that was frozen without sources
        found = importlib.import_module(module)
        marks = {name: getattr(getattr(found, name), "dispatches", None) for name in found.__all__}
        return tuple(found.__all__), {name: mark for name, mark in marks.items() if mark is not None}
    listed = _ALL.search(source)
    names = tuple(re.findall(r"[\"'](\w+)[\"']", listed[1])) if listed else ()
    said = {name: _NO_DISPATCH not in arguments for arguments, name in _PUBLIC.findall(source)}
    return names, {**said, **{other: said[name] for other, name in _OTHER_NAME.findall(source) if name in said}}


_catalog = _Catalog()

load = _catalog.load

OPERATIONS: Mapping[str, str] = _View(lambda: _catalog.packages)
"""Operations and the package of each."""

FUNCTIONS: Mapping[str, str] = _View(lambda: _catalog.names.functions)
"""Public functions, by the names that `explain`, `kernel_registry.get` and the command line accept, and where they are."""

HELPERS: Mapping[str, str] = _View(lambda: _catalog.names.helpers)
"""Public functions that dispatch nothing, and where they are."""

FACADES: Mapping[str, str] = _View(lambda: _catalog.names.all)
"""Every public name of the facades, classes among them, and its module."""
