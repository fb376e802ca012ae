"""`gated_linear_unit` in Triton on a machine without a GPU: numbers in the interpreter, machine code ahead of time, lowering."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.call.arrays import named
from ejkernel.operations.gated_linear_unit import reference
from ejkernel.operations.gated_linear_unit.cases import CASES
from ejkernel.operations.gated_linear_unit.interface import (
    OPERATION,
    GatedLinearUnitCall,
    GatedLinearUnitInputs,
    GatedLinearUnitOutputs,
)
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel_triton._versions import version_problem
from ejkernel_triton.gated_linear_unit import capability, config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton.gated_linear_unit import kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
SMALL = {case.name: case for case in CASES if not case.is_benchmark}


def close(got, wanted, limit, name, gradient=False):
    """NaN where the reference has it; of a gradient what the reference has NaN for is not compared."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted)
    if gradient:
        got, wanted = np.where(np.isnan(wanted), 0, got), np.where(np.isnan(wanted), 0, wanted)
    scale = np.max(np.abs(wanted), initial=0, where=np.isfinite(wanted))
    np.testing.assert_allclose(got, wanted, rtol=limit, atol=limit * scale, err_msg=name)


def check(name, choice, dtype="float32", limit=2e-6):
    case = SMALL[name]
    arrays = {name: jnp.asarray(value, dtype) for name, value in case.arrays(np.random.default_rng(0)).items()}
    bound = OPERATION.canonicalise(**arrays, **case.options)
    with np.errstate(all="ignore"):
        exact = reference.forward(bound.call, widened(bound.inputs))
        got = kernel.forward(bound.call, bound.inputs, choice)
        close(got.out, exact.out, limit, "out")
        grad = GatedLinearUnitOutputs(jnp.asarray(np.random.default_rng(1).standard_normal(got.out.shape), dtype))
        gradients = kernel.backward(bound.call, bound.inputs, got, grad, choice)
        expected = reference.backward(bound.call, widened(bound.inputs), exact, widened(grad))
    assert [name for name, _ in named(gradients)] == [name for name, _ in named(bound.inputs)]
    for name, value in named(gradients):
        close(value, getattr(expected, name), limit, f"gradient of {name}", gradient=True)
        assert value.dtype == dtype


@pytest.mark.parametrize("name", SMALL)
@needs_jax_triton
def test_numbers_in_the_interpreter(interpreted, name):
    check(name, config.Config(64, 1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["silu", "gelu-packed", "gpt-oss-packed"])
@needs_jax_triton
def test_half_precision(interpreted, name, dtype):
    check(name, config.Config(32, 1), dtype, 2**-8 if dtype == "bfloat16" else 2**-11)


@pytest.mark.parametrize("name", ["tails", "packed-odd"])
@needs_jax_triton
def test_every_size_of_blocks_gives_the_same_numbers(interpreted, name):
    for block in (32, 128, 256, 1024):
        check(name, config.Config(block, 1))


def _call(packed, dtype="bfloat16", activation="silu"):
    shape = (16384, 14336)
    gate = ArraySpec((shape[0], shape[1] * (2 if packed else 1)), dtype)
    return GatedLinearUnitCall(gate=gate, up=None if packed else gate, activation=activation)


def test_search_space_is_small_and_holds_the_heuristic():
    for call in (_call(True), _call(False), GatedLinearUnitCall(gate=ArraySpec((1, 2), "float32"))):
        found = config.FORWARD.search_space(call, H200)
        assert config.heuristic(call, H200) in found
        assert len(found) == len(set(found)) <= 8


@pytest.mark.parametrize("number", [80, 90, 100])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_compiles_without_spills(recorder, packed, number, activation):
    call = _call(packed, activation=activation)
    specs = {name: getattr(call, name) for name in GatedLinearUnitInputs._fields}
    inputs = GatedLinearUnitInputs(
        **{n: None if s is None else jax.ShapeDtypeStruct(s.shape, s.dtype) for n, s in specs.items()}
    )

    def both(inputs):
        outputs = kernel.forward(call, inputs, config.heuristic(call, H200))
        return kernel.backward(call, inputs, outputs, outputs, config.heuristic(call, H200))

    jax.eval_shape(both, inputs)
    assert len(recorder.compilations) == 2
    for compilation, arrays in zip(recorder.compilations, (2, 3), strict=True):
        program = compilation.compile(number)
        assert testing.stack_bytes(program) <= testing.tolerated_stack()
        assert program.asm["ptx"].count("ld.global.v4.b32") == arrays, "rows are not read by 16 bytes"


@needs_jax_triton
@pytest.mark.parametrize("packed", [False, True])
def test_lowers_for_cuda(packed):
    def loss(*arrays):
        return ejkernel.gated_linear_unit(*arrays, platform="triton").astype(jnp.float32).sum()

    arrays = [jax.ShapeDtypeStruct((4, 64), "bfloat16")] * (1 if packed else 2)
    with ejkernel.use(target=H200):
        text = jax.jit(jax.grad(loss, tuple(range(len(arrays)))))
        text = text.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert "ejkernel.gated_linear_unit.backward[triton]" in text


@needs_jax_triton
def test_supports():
    assert capability.supports_forward(_call(True), H200) is None
    assert "the target is cpu" in str(capability.supports_backward(_call(True), Target("cpu")))
    assert "gate is float64" in str(capability.supports_forward(_call(False, "float64"), H200))
