"""Kernels compiled for GPUs that are not there: every operation's, and that what is beyond a limit is found."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from ejkernel.testing.problem import operations_of, representative
from ejkernel_triton._versions import version_problem

pytest.importorskip("triton", reason="install triton to compile Triton kernels")

import triton
import triton.language as tl

from ejkernel_triton import _ahead_of_time as aot, testing

pytestmark = pytest.mark.skipif(version_problem() is not None, reason=f"kernels are refused here: {version_problem()}")


@pytest.fixture(autouse=True)
def own_caches(triton_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("EJKERNEL_TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize("operation", operations_of("triton"))
def test_an_operation_within_the_limits(operation):
    """One case on one GPU here; `nox -s triton_aot` compiles all of them for all."""
    rows = list(aot.compiled(operation, representative(operation)[:1], ("bfloat16",), (90,)))
    assert rows
    assert [row.problem() for row in rows if row.problem()] == []
    assert all(row.registers > 0 and row.limit == 227 * 1024 for row in rows)


def test_both_phases_are_compiled_and_each_kernel_once():
    cases = representative("rms_norm")
    rows = list(aot.compiled("rms_norm", [*cases, *cases], ("float32",), (80,)))
    assert {row.operation for row in rows} == {"rms_norm"}
    assert len({row.kernel for row in rows}) == 2
    assert len({(row.kernel, tuple(row.constants.items()), row.num_warps) for row in rows}) == len(rows)
    assert {row.limit for row in rows} == {163 * 1024}


def test_every_config_of_the_search_space_is_tried():
    (case, *_) = representative("rms_norm")
    found = {config for config, _ in aot.recorded("rms_norm", case, "float32", aot.target_of(90), space=True)}
    assert len(found) > 10 and "" not in found


def test_what_is_refused_is_not_compiled():
    (case, *_) = representative("rms_norm")
    assert list(aot.recorded("rms_norm", case, "float32", aot.target_of(75))) == []


@triton.jit
def greedy_kernel(p_x, count, p_out, BLOCK: tl.constexpr):
    """Holds a block until its sum is known."""
    o_x = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o_x, mask=o_x < count)
    b_sum = tl.cumsum(b_x, axis=0)
    tl.store(p_out + o_x, b_sum * tl.sum(b_x, axis=0) + b_x, mask=o_x < count)


def compilation(block, num_warps=1, count=7):
    recorder = testing.Recorder()
    x = jnp.zeros(block)
    (out,) = recorder(greedy_kernel, (x, count), ((x.shape, x.dtype),), grid=1, num_warps=num_warps, BLOCK=block)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    (found,) = recorder.compilations
    return found


def test_resources_are_those_of_the_machine_code():
    small = testing.resources(compilation(64).compile(90))
    assert small.stack == 0 and 0 < small.registers < 64
    large = testing.resources(compilation(16384).compile(90))
    assert large.stack > 1000
    assert testing.resources(compilation(4096, num_warps=8).compile(90)).shared > 0


LISTING = """
.L_x_0:
        /*0000*/                   STL [R1], R2 ;
.L_x_1:
        /*0010*/                   LDL R2, [R1] ;
        /*0020*/                   FADD R2, R2, R3 ;
        /*0030*/                   FADD R2, R2, R3 ;
        /*0040*/              @!P0 BRA `(.L_x_1) ;
        /*0050*/               @P1 BRA `(.L_x_0) ;
        /*0060*/                   LDL R4, [R1] ;
.L_x_2:
        /*0070*/                   BRA `(.L_x_2) ;
"""


def test_only_what_innermost_loops_spill_counts():
    assert testing.spilling_of(LISTING) == 1 / 4
    assert testing.spilling_of(LISTING.replace("/*0010*/                   LDL", "/*0010*/                   LDS")) == 0
    assert testing.spilling_of("") == 0


def test_an_integer_of_one_is_a_constant_as_in_a_launch():
    assert list(compilation(64, count=1).types) == ["*fp32", "1", "*fp32"]
    assert "count" not in compilation(64, count=1).compile(90).asm["ttir"].split("{")[0]
    assert compilation(64, count=2**31).types[1] == "i64"
    assert compilation(64, count=1).identity != compilation(64).identity == compilation(64, count=9).identity


ROW = aot.Row("softmax", "plain", "float32", "", "greedy", 90, {"BLOCK": "64"}, 4, 1, 128, 0, 1024, 2048)


def test_limits():
    assert ROW.problem() is None
    shared = dataclasses.replace(ROW, shared=2049, config="a config")
    assert "2049 bytes of shared memory, the device has 2048" in shared.problem()
    assert "greedy for sm_90 (softmax, plain, float32, a config)" in shared.problem()
    spilling = dataclasses.replace(ROW, stack=16, spilling=0.2)
    assert "spills 16 bytes per thread, with 20% of the instructions of a loop" in spilling.problem()
    assert dataclasses.replace(spilling, config="of the search space").problem() is None
    assert dataclasses.replace(spilling, spilling=0.01).problem() is None


def test_leave_to_spill_is_narrow():
    spilling = dataclasses.replace(ROW, stack=16, spilling=0.2)
    leave = aot.Allowance("greedy", 0.2, "measured to be faster", {"BLOCK": 64}, (90,))
    assert spilling.problem([leave]) is None
    for other in (
        dataclasses.replace(leave, most=0.19),
        dataclasses.replace(leave, kernel="other"),
        dataclasses.replace(leave, constants={"BLOCK": 128}),
        dataclasses.replace(leave, capabilities=(80,)),
        dataclasses.replace(leave, dtypes=("bfloat16",)),
    ):
        assert "spills" in spilling.problem([other])


def test_every_allowance_says_why():
    assert all(len(allowance.reason) > 20 for allowance in aot.ALLOWED)


def test_the_summary_has_a_line_per_kernel_and_capability():
    rows = [ROW, dataclasses.replace(ROW, shared=2000), dataclasses.replace(ROW, capability=80)]
    head, *lines = aot.summary(rows)
    assert head.split() == ["kernel", "sm", "compiled", "registers", "stack", "shared", "limit"]
    assert [line.split() for line in lines] == [
        ["greedy", "80", "1", "128", "0", "1024", "2048"],
        ["greedy", "90", "2", "128", "0", "2000", "2048"],
    ]
