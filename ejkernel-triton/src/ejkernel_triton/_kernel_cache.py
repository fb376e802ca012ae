"""Kernels are compiled once: what jax-triton compiles while JAX lowers is kept on disk, and no later process compiles it again.

jax-triton forms a kernel's first IR (`code_gen.ast_to_ttir`), takes that as text, and makes PTX of it (`compile_ttir_inplace`).
Both are looked up in its module when they are called, so `install` puts others there, for kernels of ours alone. They are
answered from the store when the key is known: Triton's own hash of the source with everything that it calls, the
signature and the constants; its options (warps, stages, fusion, architecture); the versions of jax-triton and Triton, ptxas too.

A kernel that describes tensors to the copy engine (`tl.make_tensor_descriptor`) writes the descriptors to global scratch memory,
for which jaxlib passes a null pointer. `_with_scratch` has it take its own last parameter, `p_scratch`, instead.

Nothing in the result tells one process, folder or day from another, so that lowered programs are equal byte for byte and JAX's
persistent cache of compiled programs is hit as well. For this, PTX has no line tables, unless TRITON_DISABLE_LINE_INFO=0.
"""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import re
import threading
from pathlib import Path
from typing import Any, cast

from ejkernel._kernel_store import KernelStore

LEVEL = 1
"""Of the entries' form; raised whenever it, or what is compiled for one key, changes."""

STORE = KernelStore("triton")

_CALLED = {"code_gen", "ast_to_ttir", "compile_ttir_inplace"}
_ARGUMENTS = ("ttir", "backend", "options", "compute_capability", "platform")
_RESULTS = ("binary", "name", "shared_mem_bytes", "ttgir", "llir")
_LINE_INFO = "TRITON_DISABLE_LINE_INFO"
_SCRATCH = "p_scratch"

_registered: dict[int, Any] = {}
_installing = threading.Lock()
_compiling = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Entry:
    """A compiled kernel: its name in the PTX, its shared memory in bytes, the first IR and the PTX."""

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
    """In place of a kernel's first IR, where the whole kernel is known."""

    entry: Entry

    def __str__(self) -> str:
        return self.entry.ttir


@dataclasses.dataclass(frozen=True)
class _Uncached:
    """A kernel's first IR, with the key under which the kernel will be stored, None if it will not.

    `parameters` is how many a kernel with `p_scratch` has; 0 for others.
    """

    module: Any
    key: str | None
    ttir: str
    parameters: int

    def __str__(self) -> str:
        return self.ttir


def keep(kernel: Any) -> None:
    """Have what is compiled of this kernel kept; others that call jax-triton are left alone."""
    _registered[id(kernel)] = kernel


def patch_problem(library: Any) -> str | None:
    """Why kernels cannot be kept with this version of jax-triton; None if they can."""
    names = ("get_or_create_triton_kernel", "compile_ttir_inplace", "CompilationResult")
    create, compile_, result = (cast("Any", getattr(library, name, None)) for name in names)
    if (
        None in (create, compile_, result)
        or not set(create.__code__.co_names) >= _CALLED
        or tuple(inspect.signature(compile_).parameters) != _ARGUMENTS
        or tuple(field.name for field in dataclasses.fields(result)) != _RESULTS
    ):
        version = importlib.metadata.version("jax-triton")
        return f"jax-triton {version} compiles in a way that is not known here, so every process compiles its kernels itself"
    return None


def install(library: Any) -> None:
    """Put the store into jax-triton's module, if that is built as expected; once, also where several threads come first."""
    with _installing:
        if isinstance(library.code_gen, _Frontend) or patch_problem(library) is not None:
            return
        library.code_gen = _Frontend(library.code_gen)
        library.compile_ttir_inplace = functools.partial(_compile, library.compile_ttir_inplace, library.CompilationResult)


class _Frontend:
    """Triton's code generator, which answers for known kernels of ours without generating."""

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


def _compile(compile_: Any, result: Any, ttir: Any, backend: Any, options: Any, compute_capability: Any, platform: str) -> Any:
    if isinstance(ttir, _Cached):
        return _as_result(result, ttir.entry)
    if not isinstance(ttir, _Uncached):
        return compile_(ttir, backend, options, compute_capability, platform)
    if ttir.key is None:
        compiled = compile_(ttir.module, backend, options, compute_capability, platform)
        return dataclasses.replace(compiled, binary=_with_scratch(compiled.binary, compiled.name, ttir.parameters))
    from triton import knobs

    with _compiling, knobs.compilation.scope():
        knobs.compilation.disable_line_info = not _line_info()
        compiled = compile_(ttir.module, backend, options, compute_capability, platform)
    binary = _with_scratch(compiled.binary, compiled.name, ttir.parameters)
    entry = Entry(compiled.name, compiled.shared_mem_bytes, str(ttir), binary)
    STORE.put(ttir.key, entry.dump())
    return _as_result(result, entry)


def _with_scratch(ptx: str, name: str, parameters: int) -> str:
    """Have a kernel of so many parameters read the address of its scratch memory from the last of them; 0 for one without.

    After those Triton declares two more: the address of global scratch memory, and that of a profiler's.
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
    """Whoever asks for every step of the compilation gets it from the compiler."""
    return options.arch.startswith("sm") and not options.debug and not os.environ.get("JAX_TRITON_DUMP_DIR")


def _always_compile() -> bool:
    from triton import knobs

    return bool(knobs.compilation.always_compile)


def _line_info() -> bool:
    """Line tables hold the folder of the kernel's source; they are made only where somebody insists."""
    from triton import knobs

    return _LINE_INFO in os.environ and not knobs.compilation.disable_line_info


def _key(source: Any, options: Any) -> str:
    """The hash of all that the compiled kernel depends on."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", int(options.arch.removeprefix("sm")), 32))
    plain = [
        (index, repr(value)) for index, value in sorted(source.constants.items()) if type(value) in (bool, int, float, str)
    ]
    parts = (
        LEVEL,
        *_versions(),
        source.hash(),
        plain,
        options.hash(),
        backend.hash(),
        sorted(get_cache_invalidating_env_vars().items()),
        _line_info(),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@functools.cache
def _versions() -> tuple[str, str]:
    """Of jax-triton, and of Triton: of its wheel the hashes of all files, else what Triton itself computes from them."""
    record = importlib.metadata.distribution("triton").read_text("RECORD") or ""
    files = sorted(line for line in record.splitlines() if line.startswith("triton/") and "sha256=" in line)
    if files:
        triton = hashlib.sha256("\n".join(files).encode()).hexdigest()
    else:
        from triton.runtime.cache import triton_key

        triton = triton_key()
    return importlib.metadata.version("jax-triton"), triton


def _with_relative_paths(text: str, kernel: Any) -> str:
    """The IR's locations relative to where the kernel's and Triton's packages are installed."""
    import triton

    source = Path(inspect.getfile(kernel.fn)).parents
    roots = (Path(str(triton.__file__)).parents[1], source[min(kernel.__module__.count("."), len(source) - 1)])
    for root in roots:
        text = text.replace(f'loc("{root}{os.sep}', 'loc("')
    return text
