"""A disk cache of the kernels that jax-triton compiles while JAX lowers, so that no later process compiles them again.

jax-triton generates a kernel's TTIR (`code_gen.ast_to_ttir`) and compiles it to PTX (`compile_ttir_inplace`). It looks both
functions up in its module at each call; `install` replaces them, for our kernels only. The cache key is Triton's own hash of
the source and its callees, signature and constants; the options (warps, stages, fusion, architecture); and the versions of
jax-triton, Triton and ptxas.

A kernel with TMA descriptors (`tl.make_tensor_descriptor`) writes them to global scratch memory, for which jaxlib passes a null
pointer. `_with_scratch` makes it use its own last parameter, `p_scratch`, instead.

Cache entries do not depend on the process, the folder or the time, so lowered programs are equal byte for byte and JAX's
persistent compilation cache hits too. Hence PTX has no line tables, unless TRITON_DISABLE_LINE_INFO=0.
"""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import re
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ejkernel.utils.kernel_store import KernelStore

LEVEL = 1
"""Version of the cache format; raised when the format or the code compiled for a key changes."""

STORE = KernelStore("triton")

_CALLED = {"code_gen", "ast_to_ttir", "compile_ttir_inplace"}
_ARGUMENTS = ("ttir", "backend", "options", "compute_capability", "platform")
_RESULTS = ("binary", "name", "shared_mem_bytes", "ttgir", "llir")
_LINE_INFO = "TRITON_DISABLE_LINE_INFO"
_LINE_KNOB = "disable_line_info"
_SCRATCH = "p_scratch"

_registered: dict[int, Any] = {}
_installing = threading.Lock()
_locks: dict[Any, threading.Lock] = {}
"""One for each kernel that was wanted."""
_line_tables = threading.Lock()
_without_line_tables: list[Mapping[str, Any]] = []
"""Knobs of compilation as the first of the threads that compile without line tables found them, once for each of them."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A compiled kernel: its name in the PTX, its shared memory in bytes, its TTIR and PTX."""

    name: str
    shared: int
    ttir: str
    ptx: str

    def dump(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def load(cls, content: bytes) -> Entry:
        return cls(**json.loads(content))


@dataclasses.dataclass(frozen=True)
class _Cached:
    """Stands for the TTIR of a kernel that is in the cache."""

    entry: Entry

    def __str__(self) -> str:
        return self.entry.ttir


@dataclasses.dataclass(frozen=True)
class _Uncached:
    """The TTIR of a kernel that is not in the cache, and its key; None if it must not be cached.

    `parameters` counts the parameters of a kernel with `p_scratch`; 0 for others.
    """

    module: Any
    key: str | None
    ttir: str
    parameters: int

    def __str__(self) -> str:
        return self.ttir


def keep(kernel: Any) -> None:
    """Register a kernel for the cache. Other users of jax-triton are not affected."""
    _registered[id(kernel)] = kernel


def patch_problem(library: Any) -> str | None:
    """Why this version of jax-triton cannot be patched; None if it can."""
    names = ("get_or_create_triton_kernel", "compile_ttir_inplace", "CompilationResult")
    create, compile_, result = (cast("Any", getattr(library, name, None)) for name in names)
    if (
        None in (create, compile_, result)
        or not set(inspect.unwrap(create).__code__.co_names) >= _CALLED
        or tuple(inspect.signature(compile_).parameters) != _ARGUMENTS
        or tuple(field.name for field in dataclasses.fields(result)) != _RESULTS
    ):
        version = importlib.metadata.version("jax-triton")
        return f"jax-triton {version} compiles in a way that is not known here, so every process compiles its kernels itself"
    return None


def install(library: Any) -> None:
    """Patch jax-triton's module if it has the expected structure. Idempotent and thread-safe."""
    with _installing:
        if isinstance(library.code_gen, _Frontend) or patch_problem(library) is not None:
            return
        library.get_or_create_triton_kernel = _one_at_a_time(library.get_or_create_triton_kernel)
        library.code_gen = _Frontend(library.code_gen)
        library.compile_ttir_inplace = functools.partial(_compile, library.compile_ttir_inplace, library.CompilationResult)


class _Frontend:
    """Wraps Triton's code generator and skips it for cached kernels."""

    def __init__(self, code_generator: Any) -> None:
        self._code_generator = code_generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._code_generator, name)

    def ast_to_ttir(self, fn: Any, src: Any, *, options: Any, **rest: Any) -> Any:
        if id(fn) not in _registered:
            return self._code_generator.ast_to_ttir(fn, src, options=options, **rest)
        parameters = sum(kind != "constexpr" for kind in src.signature.values()) if _SCRATCH in fn.arg_names else 0
        if not _storable(options):
            module = self._code_generator.ast_to_ttir(fn, src, options=options, **rest)
            return _Uncached(module, None, str(module), parameters)
        key = _key(src, options)
        stored = None if _always_compile() else STORE.get(key)
        if stored is not None:
            return _Cached(Entry.load(stored))
        module = self._code_generator.ast_to_ttir(fn, src, options=options, **rest)
        return _Uncached(module, key, _with_relative_paths(str(module), fn), parameters)


def _one_at_a_time(create: Callable[..., Any]) -> Callable[..., Any]:
    """Let threads that want the same kernel wait for the first, whose result jax-triton remembers."""

    @functools.wraps(create)
    def wrapped(
        backend: Any, platform: str, fn: Any, dtypes: Sequence[str], scalars: Any, *, metaparams: Any, **options: Any
    ) -> Any:
        signature = (platform, fn, *dtypes, *((index, kind, value == 1) for index, kind, value in scalars))
        same = (*signature, *metaparams.items(), *options.items())
        with _locks.setdefault(same, threading.Lock()):
            return create(backend, platform, fn, dtypes, scalars, metaparams=metaparams, **options)

    return wrapped


def _compile(compile_: Any, result: Any, ttir: Any, backend: Any, options: Any, compute_capability: Any, platform: str) -> Any:
    if isinstance(ttir, _Cached):
        return _as_result(result, ttir.entry)
    if not isinstance(ttir, _Uncached):
        return compile_(ttir, backend, options, compute_capability, platform)
    if ttir.key is None:
        compiled = compile_(ttir.module, backend, options, compute_capability, platform)
        return dataclasses.replace(compiled, binary=_with_scratch(compiled.binary, compiled.name, ttir.parameters))
    with contextlib.nullcontext() if _line_info() else _no_line_tables():
        compiled = compile_(ttir.module, backend, options, compute_capability, platform)
    binary = _with_scratch(compiled.binary, compiled.name, ttir.parameters)
    entry = Entry(compiled.name, compiled.shared_mem_bytes, str(ttir), binary)
    STORE.put(ttir.key, entry.dump())
    return _as_result(result, entry)


def _with_scratch(ptx: str, name: str, parameters: int) -> str:
    """Make a kernel read its scratch pointer from its last parameter; `parameters` is 0 for a kernel without scratch memory.

    Triton appends two parameters: pointers to global scratch memory and to profiler scratch memory.
    """
    if not parameters:
        return ptx
    declared = len(re.findall(rf"^\s*\.param .*\b{name}_param_\d+,?\s*$", ptx, re.MULTILINE))
    if declared != parameters + 2:
        raise RuntimeError(
            f"{name}: got {declared} parameters from this version of Triton, expected {parameters} and two for scratch"
        )
    return re.sub(rf"\[{name}_param_{parameters}([]+])", rf"[{name}_param_{parameters - 1}\1", ptx)


def _as_result(result: Any, entry: Entry) -> Any:
    return result(binary=entry.ptx, name=entry.name, shared_mem_bytes=entry.shared, ttgir=None, llir=None)


def _storable(options: Any) -> bool:
    """Debug dumps need a real compilation."""
    return options.arch.startswith("sm") and not options.debug and not os.environ.get("JAX_TRITON_DUMP_DIR")


def _always_compile() -> bool:
    from triton import knobs

    return bool(knobs.compilation.always_compile)


def _line_info() -> bool:
    """Line tables contain the source folder, so they are generated only on request."""
    from triton import knobs

    return _LINE_INFO in os.environ and not knobs.compilation.disable_line_info


@contextlib.contextmanager
def _no_line_tables() -> Generator[None]:
    """Compile without line tables, in any number of threads.

    Triton has one knob for all of them. It is not set as an attribute: that would write the environment variable too, which is
    part of cache keys.
    """
    from triton import knobs

    own = vars(knobs.compilation)
    with _line_tables:
        _without_line_tables.append(_without_line_tables[0] if _without_line_tables else dict(own))
        own[_LINE_KNOB] = True
    try:
        yield
    finally:
        with _line_tables:
            found = _without_line_tables.pop()
            if not _without_line_tables:
                del own[_LINE_KNOB]
                own.update(found)


def has_knobs_set(knobs: Any) -> bool:
    """Whether the user has set knobs of Triton in Python."""
    with _line_tables:
        own = {id(knobs.compilation): _without_line_tables[0]} if _without_line_tables else {}
        groups = (group for group in vars(knobs).values() if isinstance(group, knobs.base_knobs))
        return any(own.get(id(group), vars(group)) for group in groups)


def _key(source: Any, options: Any) -> str:
    """The cache key: a hash of everything that the compiled kernel depends on."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", int(options.arch.removeprefix("sm")), 32))
    plain = [
        (index, repr(value)) for index, value in sorted(source.constants.items()) if type(value) in (bool, int, float, str)
    ]
    parts = (
        LEVEL,
        *versions_key(),
        source.hash(),
        plain,
        options.hash(),
        backend.hash(),
        sorted(get_cache_invalidating_env_vars().items()),
        _line_info(),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@functools.cache
def versions_key() -> tuple[str, str]:
    """The version of jax-triton, and a hash of Triton's files: of the wheel's RECORD, else Triton's own key."""
    record = importlib.metadata.distribution("triton").read_text("RECORD") or ""
    files = sorted(line for line in record.splitlines() if line.startswith("triton/") and "sha256=" in line)
    if files:
        triton = hashlib.sha256("\n".join(files).encode()).hexdigest()
    else:
        from triton.runtime.cache import triton_key

        triton = triton_key()
    return importlib.metadata.version("jax-triton"), triton


def _with_relative_paths(text: str, kernel: Any) -> str:
    """Make the IR's locations relative to the installation folders of the kernel's package and of Triton."""
    import triton

    source = Path(inspect.getfile(kernel.fn)).parents
    roots = (Path(str(triton.__file__)).parents[1], source[min(kernel.__module__.count("."), len(source) - 1)])
    for root in roots:
        text = text.replace(f'loc("{root}{os.sep}', 'loc("')
    return text
