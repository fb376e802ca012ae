"""Lowered code of implementations, on disk: a kernel is traced and lowered once per machine, not in every process.

Kernels of hundreds of lines take JAX up to a second each. What lowering gave is kept as an exported program under the hash of
everything that it depends on, so that it is never wrong, only absent; programs call it, in the process that made it too, so that
they are equal byte for byte and JAX's persistent compilation cache hits.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export

from ejkernel._plugins.containment import contained
from ejkernel._plugins.export import EXPORT_DISABLED_CHECKS
from ejkernel._plugins.records import Candidate
from ejkernel.call.arrays import named
from ejkernel.call.request import Request
from ejkernel.plugin import Phase, resolve
from ejkernel.utils.kernel_store import KernelStore

LEVEL = 1
"""Version of what is stored; raised when its form changes."""

STORE = KernelStore("lowered")

_MOST_IN_MEMORY = 512
_AS_IT_IS = "jax_export_ignore_forward_compatibility"
_read: dict[str, jax.export.Exported] = {}


def run_lowered(
    request: Request,
    chosen: Candidate,
    phase: Phase,
    config: Any,
    arguments: tuple[Any, ...],
    trace: Callable[..., Any],
    outputs: type[Any],
) -> Any:
    """Call what tracing and lowering an implementation gave, whenever that was.

    Args:
        request: of the call.
        chosen: the implementation.
        phase: of the call.
        config: that it runs with.
        arguments: tuples of arrays.
        trace: the implementation's code, called with the arguments.
        outputs: the type of what it returns.
    """
    arrays, structure = jax.tree.flatten(arguments)
    depends = _depends(request, chosen, arrays)
    if depends is None:
        return trace(*arguments)
    specs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    own = (chosen.id, request.operation.name, phase, request.target, request.call, config, str(structure), specs)
    key = hashlib.sha256(repr((*own, depends)).encode()).hexdigest()

    def flat(*arrays: Any) -> dict[str, Any]:
        return dict(named(trace(*jax.tree.unflatten(structure, arrays))))

    found = _exported(key, flat, specs, request.target.backend).call(*arrays)
    return outputs(**{**dict.fromkeys(outputs._fields), **found})


def _depends(request: Request, chosen: Candidate, arrays: Sequence[Any]) -> tuple[Any, ...] | None:
    """What the lowered code depends on beside the call; None where nothing is kept: arrays in pieces that other devices hold, sizes
    that are not known yet, and whatever the implementation's own function says."""
    reference, target = chosen.implementation.lowered_from, chosen.implementation.target
    if reference is None or not isinstance(target, str) or importlib.util.find_spec("flatbuffers") is None:
        return None
    whole = jax.sharding.get_abstract_mesh().empty
    if not whole or not all(type(size) is int for array in arrays for size in array.shape):
        return None
    own = contained(f"{chosen.id}: lowered_from", resolve(reference))
    if own is None:
        return None
    sources = (digest(package) for package in (__package__.partition(".")[0], target.partition(".")[0]))
    settings = (jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision)
    return (LEVEL, own, *sources, *_versions(), *settings)


def _exported(key: str, function: Callable[..., Any], specs: Sequence[Any], backend: str) -> jax.export.Exported:
    if key not in _read:
        stored = STORE.get(key)
        if stored is None:
            stored = _lower(function, specs, backend)
            STORE.put(key, stored)
        if len(_read) >= _MOST_IN_MEMORY:
            _read.clear()
        _read[key] = jax.export.deserialize(bytearray(stored))
    return _read[key]


def _lower(function: Callable[..., Any], specs: Sequence[Any], backend: str) -> bytes:
    # only this version of JAX reads it: nothing need be written as older versions would
    before = getattr(jax.config, _AS_IT_IS)
    jax.config.update(_AS_IT_IS, True)
    try:
        export = jax.export.export(
            jax.jit(function), platforms=["cuda" if backend == "gpu" else backend], disabled_checks=EXPORT_DISABLED_CHECKS
        )
        return bytes(export(*specs).serialize())
    finally:
        jax.config.update(_AS_IT_IS, before)


@functools.cache
def digest(package: str) -> str:
    """A hash of a package's Python files."""
    spec = importlib.util.find_spec(package)
    found = hashlib.sha256()
    for root in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(root).rglob("*.py")):
            content = path.read_bytes()
            found.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return found.hexdigest()


@functools.cache
def _versions() -> tuple[str, ...]:
    return tuple(importlib.metadata.version(name) for name in ("jax", "jaxlib"))
