"""The library's kernels compiled for this host, where fibers stand for threads, called with NumPy arrays."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

KINDS = {"float32": 0, "bfloat16": 1}
SCALAR_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
"""As `ScalarType` of reduce.cuh."""
PACK = {"float32": 4, "bfloat16": 8}
_GUARD = 64
_HERE = pathlib.Path(__file__).parent


def cuda_headers() -> pathlib.Path | None:
    nvcc = shutil.which("nvcc")
    places = [pathlib.Path("/usr/local/cuda/include")] + ([pathlib.Path(nvcc).resolve().parents[1] / "include"] if nvcc else [])
    return next((place for place in places if (place / "cuda_fp8.h").is_file()), None)


def missing() -> str | None:
    """Which of a C++20 compiler and CUDA's headers is missing; None if both are installed."""
    if shutil.which("g++") is None:
        return "needs g++ on the PATH"
    return None if cuda_headers() else "needs the headers of a CUDA toolkit"


def compiled(source: str, *flags: str) -> ctypes.CDLL:
    """A file of `host` as a library, of the kernels in `csrc` or in the folder that `EJKERNEL_HOST_CSRC` names.

    With ccache, what was compiled before is not compiled again; of processes that ask for the same at the same time one does.
    """
    csrc = pathlib.Path(os.environ.get("EJKERNEL_HOST_CSRC", _HERE.parent / "csrc"))
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ejkernel-host-"))
    unlinked, built = folder / "kernels.o", folder / "kernels.so"
    include = [f"-I{place}" for place in (".", _HERE / "host", cuda_headers())]
    races = ["-fsanitize=thread", "-g"] if os.environ.get("EJKERNEL_HOST_RACES") else []  # host_races.py
    kind = ["-std=c++20", "-fPIC", *flags, *races]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | {"CCACHE_NOHASHDIR": "1"}
    with _alone("-".join([source, *kind])):
        command = [*_ccache(), "g++", *kind, "-DEJKERNEL_ON_HOST", *include, "-c", str(_HERE / "host" / source)]
        subprocess.run([*command, "-o", str(unlinked)], check=True, env=environment, cwd=csrc)  # a copy compiles to the same
    subprocess.run(["g++", "-shared", *races, "-o", str(built), str(unlinked)], check=True, env=environment)
    loaded = ctypes.CDLL(str(built))
    atexit.register(shutil.rmtree, folder)  # reports need its symbols until then
    return loaded


def _ccache() -> list[str]:
    beside = pathlib.Path(sys.executable).parent / "ccache"
    return [str(beside)] if beside.is_file() else [found] if (found := shutil.which("ccache")) else []


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """One process of this user at a time."""
    with open(pathlib.Path(tempfile.gettempdir()) / f"ejkernel-{os.getuid()}-{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def library(name: str, *flags: str) -> ctypes.CDLL:
    """Kernels by the name of their file."""
    return compiled(f"{name}_on_host.cc", "-O1", *flags)


class Guarded:
    """An array between guard bytes of all ones, NaN as floats. A kernel must not change the guards of an output."""

    def __init__(self, values: Any, *, output: bool = False) -> None:
        values = np.asarray(values)
        raw = np.full(values.nbytes + 2 * _GUARD + 16, 0xFF, np.uint8)
        start = _GUARD + -(raw.ctypes.data + _GUARD) % 16
        self._raw, self._span, self._output = raw, (start, start + values.nbytes), output
        self.array = raw[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
        if not output:
            self.array[...] = values

    @property
    def pointer(self) -> ctypes.c_void_p:
        """Keeps the array alive while it is an argument itself, but not as a field of a structure."""
        found = ctypes.c_void_p(self.array.ctypes.data)
        found.owner = self  # pyright: ignore[reportAttributeAccessIssue]
        return found

    def checked(self) -> np.ndarray:
        """The array, after a check of its guards."""
        first, last = self._span
        assert (self._raw[:first] == 0xFF).all() and (self._raw[last:] == 0xFF).all()
        return self.array


def output(shape: tuple[int, ...], dtype: Any) -> Guarded:
    return Guarded(np.zeros(shape, dtype), output=True)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


class Shape(ctypes.Structure):
    """A launch: rows of `groups` groups, `workers` for each, threads and blocks per row, packs per thread (0: multi-pass rows),
    stages in shared memory."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows_per_group", "groups", "workers")),
        *((name, ctypes.c_int) for name in ("threads", "items", "cluster", "stages")),
    )


class Parameter(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))


class Stored(ctypes.Structure):
    """A parameter in float32 or, `narrow`, in the dtype of what is normalised."""

    _fields_ = (*Parameter._fields_, ("narrow", ctypes.c_bool))


class Mask(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("per_element", ctypes.c_bool),
        ("axes", ctypes.c_int),
        ("size", ctypes.c_int64 * 8),
        ("stride", ctypes.c_int64 * 8),
    )


class Heads(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("batch", "length", "heads", "step")),
        ("width", ctypes.c_int),
        ("half", ctypes.c_int),
        ("heads_first", ctypes.c_bool),
    )


class Angles(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        *((name, ctypes.c_bool) for name in ("one_cos", "one_sin", "per_pair")),
    )


class Rotated(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in ("x", "out")), ("heads", Heads))


class Normalised(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("scale", Parameter),
        *((name, ctypes.c_void_p) for name in ("out", "rstd")),
        ("heads", Heads),
    )


class Requests(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("starts", "lengths", "tables")),
        *((name, ctypes.c_bool) for name in ("one_starts", "one_lengths", "one_tables")),
        *((name, ctypes.c_int64) for name in ("tokens", "requests", "table_width", "pages", "page_size")),
    )


class Block(ctypes.Structure):
    """A launch over `rows` tokens: threads of a block, and tokens that it stores."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_uint) for name in ("x", "y")),
        ("tokens", ctypes.c_int),
    )


class PageWrite(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("from_", "pages", "scale")),
        *(
            (name, ctypes.c_int64)
            for name in ("page_stride", "token_stride", "head_stride", "batch_stride", "scale_batch_stride")
        ),
        *((name, ctypes.c_int) for name in ("scale_head_stride", "heads", "size")),
    )


class Side(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("page", "token", "head", "batch")),
        ("size", ctypes.c_int),
        ("packed", ctypes.c_bool),
    )


class Problem(ctypes.Structure):
    _fields_ = (
        ("requests", Requests),
        ("query", ctypes.c_void_p),
        *((name, Side) for name in ("key", "value")),
        *((name, ctypes.c_void_p) for name in ("sinks", "key_scale", "value_scale")),
        *(
            (name, ctypes.c_int)
            for name in ("sinks_batch", "key_scale_batch", "key_scale_head", "value_scale_batch", "value_scale_head")
        ),
        *(
            (name, ctypes.c_int)
            for name in ("batch", "heads", "query_size", "group", "head_tiles", "key_tiles", "tile_key_heads", "window")
        ),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap")),
        *((name, ctypes.c_bool) for name in ("causal", "is_bf16")),
        ("step_bits", ctypes.c_int),
    )


class Pages(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("page", "token", "head", "batch", "size")))


class Prefill(ctypes.Structure):
    """`Call` of csrc/paged_prefill/launch.cuh."""

    _fields_ = (
        ("requests", Requests),
        *((name, Pages) for name in ("key", "value")),
        *((name, ctypes.c_void_p) for name in ("query", "out", "lse", "sinks")),
        *((name, ctypes.c_int64) for name in ("sinks_stride", "batch", "heads", "key_heads", "size", "value_size")),
        *((name, ctypes.c_int64) for name in ("window", "pack")),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
        *((name, ctypes.c_bool) for name in ("causal", "own_pages")),
    )


class Results(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("out", "lse", "partial", "partial_stats", "splits"))
