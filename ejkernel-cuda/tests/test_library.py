"""The shared library: its versions, exports and size, and the resources of its kernels."""

from __future__ import annotations

import ctypes
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys

import host_kernels
import jax
import numpy as np
import pytest

from ejkernel_cuda import _library, _plugin
from ejkernel_cuda.cudnn import _call

needs_library = pytest.mark.skipif(not _library.PATH.is_file(), reason="build the library: pip install with nvcc 13")
MOST_BYTES = 14_500_000
"""Of the code for an architecture, three of which are published; a million more for what runs on the host."""


def disassembler() -> str | None:
    """cuobjdump, of a CUDA toolkit or as Triton's package carries it."""
    spec = importlib.util.find_spec("triton")
    carried = pathlib.Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump" if spec and spec.origin else None
    return shutil.which("cuobjdump") or (str(carried) if carried and carried.is_file() else None)


@needs_library
def test_library_fits():
    assert _library.library_problem() is None
    assert _library.load().ejkernel_cuda_ffi_major() == 0


def test_versions_are_compared():
    assert _library.fit("0.1.0", "0.1.0", (0, 3), (0, 4)) is None
    assert "built as 0.0.9" in _library.fit("0.0.9", "0.1.0", (0, 3), (0, 4))
    assert "0.5" in _library.fit("0.1.0", "0.1.0", (0, 5), (0, 4))
    assert "1.0" in _library.fit("0.1.0", "0.1.0", (1, 0), (0, 4))
    assert "no header" in _library.fit("0.1.0", "0.1.0", (0, 3), None)


def test_missing_library_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(_library, "PATH", tmp_path / "libejkernel_cuda.so")
    problem = _library.library_problem.__wrapped__()
    assert "was not built" in problem and "\n" not in problem


def test_doctor_says_what_is_missing(monkeypatch):
    def unknown(name):
        raise OSError(name)

    found = {}
    monkeypatch.setattr(_library, "library_problem", lambda: "the library was not built")
    monkeypatch.setattr(_library.ctypes, "CDLL", unknown)
    _plugin.ejkernel_diagnose(found.__setitem__)
    assert found["library"] == "the library was not built"
    assert "libcuda.so.1" in found["driver"] and "\n" not in found["driver"]
    assert "\n" not in found["cudnn"]


def test_plugin_record():
    plugin = _plugin.ejkernel_plugin()
    assert [i.operation for i in plugin.implementations if i.phase == "backward"] == [
        "add_rms_norm",
        "layer_norm",
        "qk_norm_rope",
        "rms_norm",
        "rope",
        "softmax",
        "flash_attention",
        "block_sparse_attention",
    ]
    assert len({(i.operation, i.phase) for i in plugin.implementations}) == 18
    assert plugin.custom_calls[:17] == tuple(f"ejkernel_cuda_{name}" for name in _plugin.HANDLERS)
    assert plugin.custom_calls[17:] == (_call.FORWARD, _call.BACKWARD)


@needs_library
@pytest.mark.parametrize("name", _plugin.HANDLERS)
def test_handlers_and_their_checks_are_exported(name):
    library = _library.load()
    assert getattr(library, f"ejkernel_cuda_{name}") is not None
    assert getattr(library, f"ejkernel_cuda_{name}_check") is not None


@pytest.fixture(scope="module")
def traits_of(tmp_path_factory):
    built = tmp_path_factory.mktemp("traits") / "traits.so"
    source = pathlib.Path(__file__).parent / "host" / "traits.cc"
    subprocess.run(["g++", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}", "-o", built, source], check=True)
    return ctypes.CDLL(str(built)).traits_of


@needs_library
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ on the PATH")
@pytest.mark.parametrize("name", _plugin.HANDLERS)
def test_handlers_may_be_put_into_a_cuda_graph(name, traits_of):
    command_buffer_compatible = 1
    assert traits_of(getattr(_library.load(), f"ejkernel_cuda_{name}")) == command_buffer_compatible


@pytest.mark.skipif(host_kernels.missing() is not None, reason=str(host_kernels.missing()))
def test_a_result_elsewhere_starts_as_a_copy(tmp_path):
    """On the stream of the call, and only there; the copy is a host's."""
    built, source = tmp_path / "in_place.so", pathlib.Path(__file__).parent / "host" / "in_place.cc"
    folders = source.parents[2] / "csrc", jax.ffi.include_dir(), host_kernels.cuda_headers()
    includes = [f"-I{folder}" for folder in folders]
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", *includes, "-o", built, source], check=True)
    run = ctypes.CDLL(str(built)).run
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    given, elsewhere = np.arange(5.0, dtype=np.float32), np.zeros(5, np.float32)
    assert run(given.ctypes.data, elsewhere.ctypes.data, 5) == 1
    np.testing.assert_array_equal(elsewhere, given)
    assert run(given.ctypes.data, given.ctypes.data, 5) == 0
    assert run(given.ctypes.data, None, 0) == 0


def test_build_without_a_compiler_fails_with_one_sentence(tmp_path):
    cmake = f"{pytest.importorskip('cmake', reason='pip install cmake').CMAKE_BIN_DIR}/cmake"
    source = pathlib.Path(__file__).parents[1]
    environment = {"PATH": str(pathlib.Path(cmake).parent), "CUDACXX": str(tmp_path / "nvcc")}
    if (pathlib.Path(cmake).parent / "nvcc").exists():
        pytest.skip("needs cmake in another folder than nvcc")
    command = [cmake, "-S", source, "-B", tmp_path / "build", f"-DCMAKE_MAKE_PROGRAM={sys.executable}"]  # never run
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert " ".join(done.stderr.split()).count("building from source needs nvcc (CUDA 13)") == 1
    assert done.stderr.count("CMake Error") == 1


@needs_library
def test_library_is_small_and_needs_no_cuda_library():
    architectures = 3
    if tool := disassembler():
        listed = subprocess.run([tool, "--list-elf", _library.PATH], capture_output=True, text=True, check=True).stdout
        architectures = len(set(re.findall(r"sm_\w+", listed)))
    assert 0 < _library.PATH.stat().st_size < 1_000_000 + architectures * MOST_BYTES
    needed = subprocess.run(["readelf", "-d", _library.PATH], capture_output=True, text=True, check=True).stdout
    libraries = {line.split("[")[1].rstrip("]") for line in needed.splitlines() if "NEEDED" in line}
    assert "libc.so.6" in libraries
    assert not [name for name in libraries if re.match(r"lib(cu|nv)", name)]


@needs_library
def test_kernels_stay_in_registers():
    tool = disassembler()
    if tool is None:
        pytest.skip("needs cuobjdump on the PATH or in Triton's package")
    text = subprocess.run([tool, "--dump-resource-usage", _library.PATH], capture_output=True, text=True, check=True).stdout
    usage = [tuple(map(int, found)) for found in re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)]
    assert len(usage) > 200
    assert max(registers for registers, *_ in usage) <= 255  # paged attention holds the sums of wide heads in them
    assert max(stack for _, stack, *_ in usage) <= 32
    assert max(local for *_, local in usage) == 0
    assert max(shared for _, _, shared, _ in usage) <= 48 * 1024
