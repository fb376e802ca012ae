"""A kernel is compiled once for all processes, and a lowered program is the same text in each of them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

from ejkernel.errors import CacheWarning
from ejkernel.utils import warn_once as _warn
from ejkernel_triton._versions import version_problem

pytestmark = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def called(x):
    return x * 2

@triton.jit
def doubling_kernel(p_x, count, p_out, BLOCK: tl.constexpr, TIMES: tl.constexpr):
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o_x, mask=o_x < count)
    for _ in tl.static_range(TIMES):
        b_x = called(b_x)
    tl.store(p_out + o_x, b_x, mask=o_x < count)
"""

PROGRAM = """
import hashlib, json, os, sys
from unittest import mock
import jax
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import code_generator
from ejkernel.plugin import Target
from ejkernel.targets import building_for
from ejkernel_triton import _jax_triton
from doubling import doubling_kernel

def double(x, **changes):
    options = {"num_warps": 4, "num_stages": 1, "BLOCK": 128, "TIMES": 1} | changes
    return _jax_triton.call_kernel(doubling_kernel, (x, x.size), ((x.shape, x.dtype),), grid=4, **options)[0]

def lowered(function, capability="9.0", dtype="float32", size=512):
    with building_for(Target("gpu", "", capability)):
        traced = jax.jit(lambda x: function(x)).trace(jax.ShapeDtypeStruct((size,), dtype))
    return traced.lower(lowering_platforms=("cuda",)).as_text()

def counted(function):
    stages = [(CUDABackend, name) for name in ("make_ttir", "make_ttgir", "make_llir", "make_ptx", "make_cubin")]
    stages.append((code_generator, "ast_to_ttir"))
    spies = {}
    for owner, name in stages:
        spies[name] = mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))
    calls = {name: spy.start() for name, spy in spies.items()}
    try:
        text = function()
    finally:
        for spy in spies.values():
            spy.stop()
    return text, {name: call.call_count for name, call in calls.items() if call.call_count}

def variant(changes=(), **where):
    return counted(lambda: lowered(lambda x: double(x, **dict(changes)), **where))

if __name__ == "__main__":
    text, calls = variant()
    assert text.count("@triton_kernel_call") == 1
    print(json.dumps({"text": hashlib.sha256(text.encode()).hexdigest(), "calls": calls,
                      "variable": os.environ.get("TRITON_CACHE_DIR")}))
"""
ONCE = {"ast_to_ttir": 1, "make_ttir": 1, "make_ttgir": 1, "make_llir": 1, "make_ptx": 1}


@dataclasses.dataclass(frozen=True)
class Place:
    """A folder with a kernel and a program that lowers it, and a cache."""

    folder: Path
    cache: Path

    def write(self, kernel: str = KERNEL) -> Place:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "doubling.py").write_text(kernel)
        (self.folder / "program.py").write_text(PROGRAM)
        return self

    def start(self) -> subprocess.Popen[str]:
        own = {"EJKERNEL_CACHE_DIR": str(self.cache), "JAX_PLATFORMS": "cpu", "TRITON_CACHE_DIR": "/a/place"}
        command = [sys.executable, str(self.folder / "program.py")]
        return subprocess.Popen(command, env={**os.environ, **own}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self) -> dict[str, object]:
        return answer(self.start())

    @property
    def entries(self) -> list[Path]:
        return sorted(self.cache.glob("kernels-triton/*.kernel"))


def answer(process: subprocess.Popen[str]) -> dict[str, object]:
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path / "one", tmp_path / "cache").write()


def test_a_second_process_compiles_nothing(place, tmp_path):
    first, second = place.run(), place.run()
    assert (first["calls"], second["calls"]) == (ONCE, {})
    assert second["text"] == first["text"]
    assert first["variable"] == second["variable"] == "/a/place"

    elsewhere = Place(tmp_path / "another" / "folder", tmp_path / "empty").write().run()
    assert elsewhere["calls"] == ONCE
    assert elsewhere["text"] == first["text"], "the program holds a path, a pointer or a counter"


def test_processes_at_the_same_time(place):
    together = [answer(process) for process in [place.start() for _ in range(4)]]
    assert len({one["text"] for one in together}) == 1
    assert len(place.entries) == 1
    after = place.run()
    assert (after["calls"], after["text"]) == ({}, together[0]["text"])


def test_changed_source_is_compiled(place):
    before = place.run()
    place.write(KERNEL.replace("return x * 2", "return x * 3"))
    after = place.run()
    assert after["calls"] == ONCE
    assert after["text"] != before["text"]
    assert len(place.entries) == 2


@pytest.fixture
def program(place, monkeypatch):
    """The program of `place` in this process, with an empty memory."""
    for name in ("doubling", "program"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(place.folder))
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(place.cache))
    monkeypatch.setattr(_warn, "_said", set())
    import program

    from ejkernel_triton._jax_triton import _jax_triton

    monkeypatch.setattr(_jax_triton().triton_lib, "_COMPILED_KERNEL_CACHE", {})
    yield program
    for name in ("doubling", "program"):
        del sys.modules[name]


def forget(monkeypatch):
    from ejkernel_triton._jax_triton import _jax_triton

    monkeypatch.setattr(_jax_triton().triton_lib, "_COMPILED_KERNEL_CACHE", {})


VARIANTS = [
    ({"BLOCK": 256}, {}),
    ({"TIMES": 2}, {}),
    ({"num_warps": 8}, {}),
    ({"num_stages": 2}, {}),
    ({"fp_fusion": False}, {}),
    ({}, {"capability": "8.0"}),
    ({}, {"dtype": "bfloat16"}),
    ({}, {"size": 1}),  # an integer of 1 is a constant to Triton
]


def test_everything_that_matters_is_in_the_key(program, place, monkeypatch):
    for changes, where in [({}, {}), *VARIANTS]:
        before = len(place.entries)
        text, calls = program.variant(changes, **where)
        assert (calls, len(place.entries)) == (ONCE, before + 1), (changes, where)
        forget(monkeypatch)
        again, calls = program.variant(changes, **where)
        assert (again, calls) == (text, {}), (changes, where)
        forget(monkeypatch)


def test_the_size_of_arrays_is_not(program, place):
    program.lowered(program.double)
    _, calls = program.variant(size=640)
    assert (calls, len(place.entries)) == ({}, 1)


def test_other_versions_are_another_key(program, place, monkeypatch):
    from ejkernel_triton import _kernel_cache

    program.lowered(program.double)
    forget(monkeypatch)
    monkeypatch.setattr(_kernel_cache, "versions_key", lambda: ("0.3.1", "of another wheel"))
    _, calls = program.variant()
    assert (calls, len(place.entries)) == (ONCE, 2)


def test_a_damaged_entry_is_compiled_again(program, place, monkeypatch):
    text = program.lowered(program.double)
    (entry,) = place.entries
    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 2])
    forget(monkeypatch)
    again, calls = program.variant()
    assert (again, calls) == (text, ONCE)
    assert entry.read_bytes() == whole


def test_triton_may_be_told_to_compile_always(program, monkeypatch):
    program.lowered(program.double)
    forget(monkeypatch)
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    _, calls = program.variant()
    assert calls == ONCE


def test_a_cache_that_cannot_be_used_gives_one_warning(program, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(CacheWarning, match="compiled again") as caught:
        program.lowered(program.double)
        program.lowered(lambda x: program.double(x, TIMES=2))
    assert len(caught) == 1


def test_line_tables_only_where_they_are_wished(program, monkeypatch):
    from ejkernel_triton import _kernel_cache

    stored = []
    monkeypatch.setattr(_kernel_cache.KernelStore, "put", lambda self, key, content: stored.append(json.loads(content)))
    program.lowered(program.double)
    forget(monkeypatch)
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "0")
    program.lowered(program.double)
    without, with_lines = stored
    assert ".loc" not in without["ptx"] and ".loc" in with_lines["ptx"]
    assert os.environ["TRITON_DISABLE_LINE_INFO"] == "0"


def test_threads_compile_a_kernel_once(program, place):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        texts, calls = program.counted(lambda: {*pool.map(lambda _: program.lowered(program.double), range(8))})
    assert (len(texts), calls, len(place.entries)) == (1, ONCE, 1)


def test_compiling_leaves_the_settings_of_other_threads_alone(program, monkeypatch):
    """Triton's knob for line tables is of the process; cache keys hold what the user set, and so does the environment."""
    from triton import knobs

    from ejkernel_triton import _jax_triton

    before, seen = _jax_triton.lowered_from(), []
    make_ptx = program.CUDABackend.make_ptx
    two = threading.Barrier(2)

    def observed(*arguments, **options):
        two.wait(timeout=60)
        seen.append(
            (knobs.compilation.disable_line_info, os.environ.get("TRITON_DISABLE_LINE_INFO"), _jax_triton.lowered_from())
        )
        return make_ptx(*arguments, **options)

    monkeypatch.setattr(program.CUDABackend, "make_ptx", observed)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        [*pool.map(lambda block: program.lowered(lambda x: program.double(x, BLOCK=block)), (128, 256))]
    assert before is not None and seen == 2 * [(True, None, before)]
    assert not vars(knobs.compilation)


def test_kernels_that_will_be_lowered_are_compiled_while_they_are_traced(program, place, monkeypatch):
    import jax

    from ejkernel.plugin import Target
    from ejkernel.targets import building_for
    from ejkernel_triton import _compile_ahead

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(_compile_ahead, "_threads", lambda: pool)
        traced = []
        for lowered in (False, True):
            with building_for(Target("gpu", "", "9.0"), lowered=lowered):
                traced.append(jax.jit(lambda x: program.double(x)).trace(jax.ShapeDtypeStruct((512,), "float32")))
            if not lowered:
                pool.submit(int).result()
                assert place.entries == []
    assert len(place.entries) == 1
    _, calls = program.counted(lambda: [each.lower(lowering_platforms=("cuda",)) for each in traced])
    assert calls == {}


def test_what_cannot_be_compiled_raises_where_it_is_lowered(program, monkeypatch):
    import jax

    from ejkernel.plugin import Target
    from ejkernel.targets import building_for
    from ejkernel_triton import _compile_ahead

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(_compile_ahead, "_threads", lambda: pool)
        with building_for(Target("gpu", "", "9.0"), lowered=True):
            traced = jax.jit(lambda x: program.double(x, BLOCK=100)).trace(jax.ShapeDtypeStruct((512,), "float32"))
    with pytest.raises(Exception, match="power of 2"):
        traced.lower(lowering_platforms=("cuda",))


def test_kernels_of_others_are_left_alone(program, place):
    import jax
    import jax_triton
    from doubling import doubling_kernel

    from ejkernel_triton import _kernel_cache

    def theirs(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax_triton.triton_call(
            x, x.size, kernel=doubling_kernel, out_shape=shape, grid=4, compute_capability=90, BLOCK=128, TIMES=1
        )

    with mock.patch.object(_kernel_cache, "_registered", {}):
        text = program.lowered(theirs)
    assert text.count("@triton_kernel_call") == 1
    assert place.entries == []


def test_another_way_of_compiling_is_one_sentence():
    from ejkernel_triton import _kernel_cache
    from ejkernel_triton._jax_triton import _jax_triton, cache_problem

    assert cache_problem() is None
    library = _jax_triton().triton_lib

    def get_or_create_triton_kernel(fn):
        return library.compile_ttir_inplace(fn)

    changed = mock.Mock(
        get_or_create_triton_kernel=get_or_create_triton_kernel,
        compile_ttir_inplace=library.compile_ttir_inplace,
        CompilationResult=library.CompilationResult,
    )
    problem = _kernel_cache.patch_problem(changed)
    assert "jax-triton" in problem and "\n" not in problem
    before = changed.compile_ttir_inplace
    _kernel_cache.install(changed)
    assert changed.compile_ttir_inplace is before
