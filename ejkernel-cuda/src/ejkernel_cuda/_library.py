"""The shared library: its path, its compatibility with jaxlib, and the registration of its handlers on first use.

Loading needs neither a GPU nor a driver: the CUDA runtime is linked statically and looks for them at the first launch.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import pathlib
import re

import ejkernel_cuda

_NAME = "libejkernel_cuda.so"
_PLACES = [pathlib.Path(place) / _NAME for place in ejkernel_cuda.__path__]
PATH = next((place for place in _PLACES if place.is_file()), _PLACES[0])
"""An editable install keeps the built library apart from the sources, so the package has several paths."""


@functools.cache
def _ffi_version() -> tuple[int, int] | None:
    """Version of the foreign function interface of the installed jaxlib, read from its header; None if there is none."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        return None
    header = pathlib.Path(spec.origin).parent / "include" / "xla" / "ffi" / "api" / "c_api.h"
    if not header.is_file():
        return None
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header.read_text()))
    return int(found["MAJOR"]), int(found["MINOR"])


@functools.cache
def library_problem() -> str | None:
    """One sentence saying why the library cannot be used here; None if it can."""
    if not PATH.is_file():
        return f"the library {PATH.name} was not built; install a wheel of ejkernel-cuda, or build it with nvcc"
    try:
        library = ctypes.CDLL(str(PATH))
    except OSError as error:
        return f"the library {PATH.name} does not load: {error}"
    version = importlib.metadata.version("ejkernel-cuda")
    library.ejkernel_cuda_version.restype = ctypes.c_char_p
    built = (library.ejkernel_cuda_ffi_major(), library.ejkernel_cuda_ffi_minor())
    return fit(library.ejkernel_cuda_version().decode(), version, built, _ffi_version())


def driver_problem() -> str | None:
    """One sentence saying why no kernel can run here; None if the driver sees a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "NVIDIA's driver (libcuda.so.1) is not installed, so no kernel can run here; programs still compile for a GPU"
    count = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if failed or not count.value:
        return f"NVIDIA's driver sees no GPU (error {failed}), so no kernel can run here; run nvidia-smi for details"
    return None


def fit(built_as: str, version: str, built: tuple[int, int], here: tuple[int, int] | None) -> str | None:
    """Compare the library's own version with the distribution's, and its interface version with jaxlib's."""
    if built_as != version:
        return f"the library was built as {built_as} and ejkernel-cuda is {version}; reinstall ejkernel-cuda"
    if here is None:
        return "jaxlib has no header of its foreign function interface to compare with; reinstall jaxlib"
    if built[0] != here[0] or built[1] > here[1]:
        return (
            f"the library was built for version {built[0]}.{built[1]} of XLA's foreign function interface and this jaxlib has "
            f"{here[0]}.{here[1]}; install a newer jaxlib, or build ejkernel-cuda against this one"
        )
    return None


@functools.cache
def load() -> ctypes.CDLL:
    """The library, after its version check."""
    problem = library_problem()
    if problem:
        raise ImportError(problem)
    return ctypes.CDLL(str(PATH))


@functools.cache
def handler(name: str) -> str:
    """Register a handler with XLA once, and return the name that `jax.ffi.ffi_call` takes."""
    import jax

    symbol = f"ejkernel_cuda_{name}"
    jax.ffi.register_ffi_target(symbol, jax.ffi.pycapsule(getattr(load(), symbol)), platform="CUDA")
    return symbol
