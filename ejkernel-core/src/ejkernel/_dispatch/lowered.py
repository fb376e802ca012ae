"""Lowered code of implementations, on disk: a kernel is traced and lowered once per machine, not in every process.

Kernels of hundreds of lines take JAX up to a second each. What lowering gave is kept as an exported program under the hash of
everything that it depends on, so that it is never wrong, only absent; programs call it, in the process that made it too, so that
they are equal byte for byte and JAX's persistent compilation cache hits.

A traced program has one equation for such code, which is made only when that equation is lowered: a differentiated call also has
the forward phase without residuals, which its gradient does not run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ejkernel._plugins.containment import contained, imported, raised
from ejkernel._plugins.export import EXPORT_DISABLED_CHECKS
from ejkernel._plugins.records import Candidate
from ejkernel._plugins.requirements import findable
from ejkernel.call.arrays import ArraySpec, named
from ejkernel.call.request import Request
from ejkernel.errors import PluginError
from ejkernel.plugin import Phase
from ejkernel.targets import Target, building_for
from ejkernel.utils.kernel_store import KernelStore
from ejkernel.utils.spelled import spelled

LEVEL = 1
"""Version of what is stored; raised when its form changes."""

STORE = KernelStore("lowered")

_MOST_IN_MEMORY = 512
_AS_IT_IS = "jax_export_ignore_forward_compatibility"
_WITHOUT_EFFECT = (
    _AS_IT_IS,
    "jax_compilation_cache_",
    "jax_dump_",
    "jax_log",
    "jax_persistent_cache_",
    "jax_pgle_",
    "jax_platform",
)
"""How settings of JAX begin that do not change what is lowered and differ between processes that share it."""
_IMPORTED = time.time()

_known: dict[str, _Code] = {}
_lock = threading.Lock()
_lowering: list[bool] = []
"""For each thread that is lowering, the setting `_AS_IT_IS` that it found."""


def run_lowered(
    request: Request,
    chosen: Candidate,
    phase: Phase,
    config: Any,
    arguments: tuple[Any, ...],
    trace: Callable[..., Any],
    expected: Any,
) -> Any:
    """Call what tracing and lowering an implementation gives, whenever that is.

    Args:
        request: of the call.
        chosen: the implementation.
        phase: of the call.
        config: that it runs with.
        arguments: tuples of arrays.
        trace: the implementation's code, called with the arguments.
        expected: the tuple of ArraySpecs that it returns.

    Raises:
        PluginError: the implementation's `lowered_from` cannot be imported, raises, or does not return a str or None.
    """
    arrays, structure = jax.tree.flatten(arguments)
    specs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    key = _key(request, chosen, phase, config, f"{structure} {specs}") if _is_whole(arrays) else None
    if key is None:
        return trace(*arguments)

    def flat(*arrays: Any) -> list[Any]:
        return [value for _, value in named(trace(*jax.tree.unflatten(structure, arrays)))]

    results = dict(named(expected))
    code = _known.get(key)
    if code is None:
        export = functools.partial(_export, key, flat, specs, request.target, _settings())
        code = _Code(key, chosen.id, [*results.values()], _stored(key) or export)
        with _lock:
            if len(_known) >= _MOST_IN_MEMORY:
                _known.clear()
            code = _known.setdefault(key, code)
    found = dict(zip(results, _lowered_p.bind(*arrays, code=code), strict=True))
    return type(expected)(**{**dict.fromkeys(expected._fields), **found})


class _Code:
    """Code that a program calls: exported, or how to export it when that program is lowered. Equal if the keys are."""

    def __init__(
        self,
        key: str,
        implementation: str,
        results: Sequence[ArraySpec],
        code: jax.export.Exported | Callable[[], jax.export.Exported],
    ) -> None:
        self.results = [ShapedArray(spec.shape, spec.dtype) for spec in results]
        self._key = key
        self._implementation = implementation
        self._code: Any = code
        self._exporting = threading.Lock()

    def call(self, *arrays: Any) -> Any:
        with self._exporting:
            code = self._code
            if not isinstance(code, jax.export.Exported):
                code = self._code = self._made(code)
        return code.call(*arrays)

    def _made(self, export: Callable[[], jax.export.Exported]) -> jax.export.Exported:
        try:
            return export()
        except Exception as error:
            error.add_note(
                f"raised while the code of {self._implementation} was lowered to be kept, as its Implementation.lowered_from asks"
            )
            raise

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Code) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return self._implementation


_lowered_p = Primitive("ejkernel_lowered")
_lowered_p.multiple_results = True


def _run(*arrays: Any, code: _Code) -> Any:
    return code.call(*arrays)


def _results(*_: Any, code: _Code) -> list[Any]:
    return code.results


_lowered_p.def_impl(_run)
_lowered_p.def_abstract_eval(_results)
mlir.register_lowering(_lowered_p, mlir.lower_fun(_run, multiple_results=True))


def _is_whole(arrays: Sequence[Any]) -> bool:
    """Not for arrays in pieces that other devices hold, and sizes that are not known yet."""
    return jax.sharding.get_abstract_mesh().empty and all(type(size) is int for array in arrays for size in array.shape)


def _key(request: Request, chosen: Candidate, phase: Phase, config: Any, arrays: str) -> str | None:
    """A hash of everything that the lowered code depends on; None where that is not known, or nothing shall be kept."""
    target = chosen.implementation.target
    if not isinstance(target, str) or not findable("flatbuffers"):
        return None
    own = _lowered_from(chosen)
    modules = (__name__, type(request.operation).__module__, target.partition(":")[0])
    sources = [digest(package) for package in dict.fromkeys(module.partition(".")[0] for module in modules)]
    if own is None or None in sources:
        return None
    try:
        call = spelled((request.target, request.call, config))
    except TypeError:  # a function in a call: its code is not known
        return None
    code = (chosen.id, target, request.operation.name, phase, own, *sources)
    return hashlib.sha256(repr((LEVEL, *code, call, arrays, _versions(), _settings())).encode()).hexdigest()


def _lowered_from(chosen: Candidate) -> str | None:
    what = f"{chosen.id}: lowered_from"
    try:
        function = imported(what, chosen.implementation.lowered_from)
    except Exception as error:
        raise PluginError(f"{what} cannot be imported: {raised(error)}; choose another platform") from error
    try:
        own = contained(what, function)
    except Exception as error:
        raise PluginError(f"{what} raised {raised(error)}; choose another platform, and report it to its authors") from error
    if own is not None and not isinstance(own, str):
        raise PluginError(f"{what} returned {type(own).__name__}, expected a str, or None to keep nothing")
    return own


def _settings() -> dict[str, Any]:
    return {name: value for name, value in sorted(jax.config.values.items()) if not name.startswith(_WITHOUT_EFFECT)}


def _stored(key: str) -> jax.export.Exported | None:
    """What an earlier trace left; None if there is nothing, or nothing that can be read."""
    content = STORE.get(key)
    try:
        return None if content is None else jax.export.deserialize(bytearray(content))
    except Exception:  # noqa: BLE001  # whatever flatbuffers makes of it: it is made again
        return None


def _export(
    key: str, function: Callable[..., Any], specs: Sequence[Any], target: Target, settings: dict[str, Any]
) -> jax.export.Exported:
    """Lower a function under the settings that its numbers depend on, and keep it if the others are those of the key too."""
    x64, precision = (settings[f"jax_{name}"] for name in ("enable_x64", "default_matmul_precision"))
    with building_for(target), jax.enable_x64(x64), jax.default_matmul_precision(precision):
        with _for_this_version():
            export = jax.export.export(
                jax.jit(function), platforms=[target.lowering_platform], disabled_checks=EXPORT_DISABLED_CHECKS
            )
            made = bytes(export(*specs).serialize())
        if _settings() == settings:
            STORE.put(key, made)
    return jax.export.deserialize(bytearray(made))


@contextlib.contextmanager
def _for_this_version() -> Generator[None]:
    """Only this version of JAX reads it: nothing need be written as older versions would. The setting is of all threads."""
    with _lock:
        _lowering.append(getattr(jax.config, _AS_IT_IS))
        jax.config.update(_AS_IT_IS, True)
    try:
        yield
    finally:
        with _lock:
            found = _lowering.pop()
            if not _lowering:  # the first of the threads, which found what the user set
                jax.config.update(_AS_IT_IS, found)


@functools.cache
def digest(package: str) -> str | None:
    """A hash of the Python files of a package, or of a module that is one file; None if there are none, or one was written since
    this process began to import them, so that what runs may be older."""
    spec = importlib.util.find_spec(package) if package != "__main__" and findable(package) else None
    roots = [Path(root) for root in (spec and spec.submodule_search_locations) or ()]
    single = [] if spec is None or roots or not spec.has_location else [Path(str(spec.origin))]
    files = [(path, path.name) for path in single if path.suffix == ".py" and path.is_file()]
    files += [(path, str(path.relative_to(root))) for root in roots for path in sorted(root.rglob("*.py"))]
    if not files:
        return None
    found = hashlib.sha256()
    for path, name in files:
        state = path.stat()
        if max(state.st_mtime, state.st_ctime) >= _IMPORTED:
            return None
        content = path.read_bytes()
        found.update(f"{name} {len(content)}\n".encode() + content)
    return found.hexdigest()


@functools.cache
def _versions() -> tuple[str, ...]:
    return tuple(importlib.metadata.version(name) for name in ("jax", "jaxlib"))
