"""Losses of hidden states in Triton without a GPU: cases are the conformance suite's; here, chunks of rows and machine code."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.operations import get_operation, operation_module
from ejkernel.plugin import Target
from ejkernel_triton._interpret import INTERPRET
from ejkernel_triton._versions import version_problem
from ejkernel_triton.cross_entropy import config as per_row
from ejkernel_triton.linear_cross_entropy import config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from both_phases import check_phases

from ejkernel_triton import testing
from ejkernel_triton._ahead_of_time import recorded, target_of
from ejkernel_triton.cross_entropy import kernel as per_row_kernel
from ejkernel_triton.kl_divergence import config as divergence_config, kernel as divergence
from ejkernel_triton.linear_cross_entropy import kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
CHUNKS = (1, 3, 4, 1000)
"""Rows of a chunk."""


@pytest.fixture
def called(monkeypatch):
    """Programs call the interpreter: a loop over chunks is traced."""
    monkeypatch.setenv(INTERPRET, "1")


def problem(operation, name, dtype="float32"):
    case = next(case for case in operation_module(operation, "cases").CASES if case.name == name)
    arrays = {array: np.asarray(value) for array, value in case.arrays(np.random.default_rng(0)).items()}
    arrays = {array: value.astype(dtype) if value.dtype == np.float32 else value for array, value in arrays.items()}
    bound = get_operation(operation).canonicalise(**arrays, **case.options)
    return dataclasses.replace(bound.call, save_residuals=True), jax.tree.map(jnp.asarray, bound.inputs)


@pytest.mark.parametrize("rows", CHUNKS)
@pytest.mark.parametrize("name", ["plain", "weights", "transposed", "soft-cap-excluded", "elsewhere", "several-tiles"])
def test_gradients_that_are_formed_early(called, name, rows):
    call, inputs = problem("linear_cross_entropy", name)
    check_phases(
        get_operation("linear_cross_entropy"), kernel, call, inputs, (config.Config(rows, 16, 1, 2),) * 2, (2e-6, 1e-5)
    )


@pytest.mark.parametrize("rows", CHUNKS)
@pytest.mark.parametrize("name", ["head", "head-transposed", "head-soft-cap", "several-tiles"])
def test_losses_of_rows(called, name, rows):
    call, inputs = problem("cross_entropy", name)
    check_phases(get_operation("cross_entropy"), per_row_kernel, call, inputs, (per_row.Config(16, 1, rows),) * 2)


@pytest.mark.parametrize("rows", CHUNKS)
@pytest.mark.parametrize("name", ["heads", "heads-jsd-transposed", "student-head", "teacher-head", "logits"])
def test_divergences(called, name, rows):
    call, inputs = problem("kl_divergence", name)
    check_phases(get_operation("kl_divergence"), divergence, call, inputs, (per_row.Config(8, 1, rows),) * 2)


def test_logits_that_are_rounded(called):
    """Only of bfloat16, without a bias, and where no more than its full precision is asked for."""
    call, inputs = problem("linear_cross_entropy", "plain", "bfloat16")
    assert config.narrow(call)
    assert config.narrow(dataclasses.replace(call, precision="default"))
    assert not config.narrow(dataclasses.replace(call, precision="highest"))
    assert not config.narrow(dataclasses.replace(call, head_bias=call.head))
    for dtype in ("float16", "float32"):
        assert not config.narrow(problem("linear_cross_entropy", "plain", dtype)[0])
    exact = np.float64(kernel.forward(dataclasses.replace(call, save_residuals=False), inputs, config.Config(8, 16, 1)).total)
    errors = [
        np.abs(
            np.float64(kernel.forward(dataclasses.replace(call, precision=precision), inputs, config.Config(8, 16, 1)).total)
            - exact
        )
        for precision in (None, "highest")
    ]
    assert errors[1] < 1e-5 < errors[0] < 0.02 * abs(exact[0])


@pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_lowers_for_cuda(monkeypatch, reduction):
    monkeypatch.setattr(jax, "device_count", lambda: 1)

    def loss(hidden, head, targets):
        return ejkernel.fused_cross_entropy(
            hidden=hidden, lm_head_weight=head, targets=targets, reduction=reduction, platform="triton"
        ).loss.sum()

    shapes = [jax.ShapeDtypeStruct(*each) for each in (((64, 32), "bfloat16"), ((32, 512), "bfloat16"), ((64,), "int32"))]
    with ejkernel.use(target=H200):
        text = jax.jit(jax.grad(loss, (0, 1))).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @triton_kernel_call") == (1 if reduction == "mean" else 2)
    assert text.count("stablehlo.dot_general") == (3 if reduction == "mean" else 4)


def test_chunks_of_the_bench_case():
    call, _ = problem("linear_cross_entropy", "plain", "bfloat16")
    wide = dataclasses.replace(call.x, shape=(1, 8192, 4096)), dataclasses.replace(call.head, shape=(1, 4096, 128256))
    call = dataclasses.replace(call, x=wide[0], head=wide[1])
    assert config.heuristic(call, H200).rows == 2048
    found = config.search_space(call, H200)
    assert len(found) == len({*found}) <= 12
    assert {one.rows for one in found} == {1024, 2048, 4096, 8192}


@pytest.mark.parametrize("name", ["logits", "heads", "none-valid"])
def test_search_spaces_of_divergences_are_small(name):
    call, _ = problem("kl_divergence", name)
    for space in (divergence_config.FORWARD, divergence_config.BACKWARD):
        found = space.search_space(call, H200)
        assert space.heuristic(call, H200) in found and len(found) == len({*found}) <= 9


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("name", ["bench-logits-4096x128256", "bench-heads-4096x4096x128256"])
def test_machine_code_of_divergences(triton_cache, name, sm):
    case = next(case for case in operation_module("kl_divergence", "cases").CASES if case.name == name)
    launches = [launch for _, launch in recorded("kl_divergence", case, "bfloat16", target_of(sm))]
    kernels = {launch.kernel.fn.__name__ for launch in launches}
    assert kernels == {"kl_divergence_forward_kernel", "kl_divergence_backward_kernel"}
    for launch in {launch.identity: launch for launch in launches}.values():
        compiled = launch.compile(sm)
        assert testing.stack_bytes(compiled) <= testing.tolerated_stack(), launch.constants
        assert "ld.global.v4.b32" in compiled.asm["ptx"]


@pytest.mark.parametrize("sm", [80, 90])
def test_machine_code(triton_cache, sm):
    name = "bench-8192x4096x128256"
    case = next(case for case in operation_module("linear_cross_entropy", "cases").CASES if case.name == name)
    launches = [launch for _, launch in recorded("linear_cross_entropy", case, "bfloat16", target_of(sm))]
    assert {launch.kernel.fn.__name__ for launch in launches} >= {"loss_and_gradient_kernel"}
    for launch in {launch.identity: launch for launch in launches}.values():
        compiled = launch.compile(sm)
        taken = testing.resources(compiled)
        assert taken.stack <= testing.tolerated_stack(), launch.constants
        assert "ld.global.v4.b32" in compiled.asm["ptx"] and "st.global.v4.b32" in compiled.asm["ptx"]
        assert taken.registers > 32, "two programs of 1024 threads would share a multiprocessor, and the cache"
