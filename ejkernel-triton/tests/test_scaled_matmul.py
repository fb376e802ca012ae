"""`scaled_matmul` in Triton without a GPU: cases are the conformance suite's; here, tiles, batches and machine code."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.operations.scaled_matmul.cases import CASES, arrays
from ejkernel.operations.scaled_matmul.interface import OPERATION, ScaledMatmulInputs
from ejkernel.plugin import Target
from ejkernel_triton.scaled_matmul import capability, config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from both_phases import check_phases

from ejkernel_triton import testing
from ejkernel_triton._ahead_of_time import recorded, target_of
from ejkernel_triton.scaled_matmul import kernel
from ejkernel_triton.scaled_matmul.config import Config

NAMED = {case.name: case for case in CASES}
H200 = Target("gpu", "NVIDIA H200", "9.0")


def bound(rows=(37,), inner=70, columns=45, *kinds, transpose=False, precision=None, **options):
    made = arrays(rows, inner, columns, *kinds, transpose=transpose, **options)(np.random.default_rng(0))
    return OPERATION.canonicalise(**made, transpose_rhs=transpose, out_dtype="float32", precision=precision)


def batched(found, members, rhs, lhs_scales, rhs_scales):
    """The call over a batch, of which some arrays have one of each and others one for all."""
    sizes = (members, rhs, lhs_scales, rhs_scales)
    factors = [jnp.arange(1.0, size + 1)[:, None] for size in sizes[2:]]
    given = [jnp.concatenate([array] * size) for array, size in zip(found.inputs, sizes, strict=True)]
    given[0] = given[0].at[1:, 0].set(given[0][0, 1])
    inputs = ScaledMatmulInputs(*given[:2], *(array * factor for array, factor in zip(given[2:], factors, strict=True)))
    specs = {
        name: dataclasses.replace(getattr(found.call, name), shape=value.shape) for name, value in inputs._asdict().items()
    }
    return dataclasses.replace(found.call, **specs), inputs


@pytest.mark.parametrize(
    "choice", [Config(16, 16, 32, 4, 2), Config(32, 64, 128, 4, 3, 2), Config(16, 32, 64, 4, 2, 1, True)], ids=str
)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_tiles(interpreted, kind, transpose, choice):
    found = bound((37,), 70, 45, kind, kind, transpose=transpose)
    check_phases(OPERATION, kernel, found.call, found.inputs, (choice, choice))


@pytest.mark.parametrize("sizes", [(3, 1, 1, 1), (3, 3, 1, 1), (3, 1, 3, 1), (3, 1, 1, 3), (3, 3, 3, 3)], ids=str)
@pytest.mark.parametrize("scales", ["row column", "row", "column", ""])
def test_members_of_a_batch(interpreted, scales, sizes):
    call, inputs = batched(bound((9,), 40, 21, scales=scales), *sizes)
    check_phases(OPERATION, kernel, call, inputs, (Config(16, 16, 32, 4, 2),) * 2)


@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0"])
def test_float8_is_multiplied_in_float16(interpreted, capability):
    found = bound((20,), 40, 24, "float8_e5m2", "float8_e5m2" if capability == "8.0" else "float8_e4m3fn")
    target = Target("gpu", "", capability)
    assert config.widens(found.call, target)
    with ejkernel.use(target=target):
        check_phases(OPERATION, kernel, found.call, found.inputs, (Config(16, 16, 32, 4, 2),) * 2)


def test_where_sums_may_have_fewer_bits():
    exact, fast, whole = bound().call, bound(precision="default").call, bound((4,), 8, 8, "int8", "int8").call
    assert [config.widens(call, H200) for call in (exact, fast, whole)] == [True, False, False]
    assert [config.widens(call, Target("gpu", "", "8.9")) for call in (exact, fast, whole)] == [True, False, False]
    assert [config.widens(call, Target("gpu", "", "8.0")) for call in (exact, fast, whole)] == [True, True, False]


@pytest.mark.parametrize("precision", [None, "default"])
@pytest.mark.parametrize("name", ["bench-float8-8192x4096x4096", "bench-int8-8192x4096x4096"])
def test_large_tiles_use_one_byte_units_and_spill_nothing(triton_cache, name, precision):
    case = dataclasses.replace(NAMED[name], options={**NAMED[name].options, "precision": precision})
    launches = [launch for _, launch in recorded("scaled_matmul", case, "bfloat16", target_of(90))]
    assert [launch.kernel.fn.__name__ for launch in launches] == ["scaled_matmul_kernel", "scale_gradient_kernel"]
    for launch in launches:
        compiled = launch.compile(90)
        assert testing.stack_bytes(compiled) <= testing.tolerated_stack(), launch.constants
        float8 = "f32.e4m3.e4m3" if precision == "default" else "f32.f16.f16"
        assert ("s32.s8.s8" if "int8" in name else float8) in compiled.asm["ptx"]
        assert compiled.metadata.shared <= 227 * 1024


@pytest.mark.parametrize("target", [80, 89, 100, 120])
@pytest.mark.parametrize("name", ["float8-e5m2", "float8-gradient-of-lhs", "int8"])
def test_compiles_where_it_is_supported(triton_cache, name, target):
    refused = capability.supports_forward(call_of(name), target_of(target)) is not None
    assert refused == (target == 80 and name == "float8-gradient-of-lhs")
    launches = [launch for _, launch in recorded("scaled_matmul", NAMED[name], "float32", target_of(target))]
    assert len(launches) == (0 if refused else 2)
    for launch in launches:
        assert launch.compile(target).asm["ptx"]


def call_of(name):
    return OPERATION.canonicalise(**NAMED[name].arrays(np.random.default_rng(0)), **NAMED[name].options).call


def test_what_is_refused():
    call = call_of("float8")
    assert capability.supports_forward(call, Target("gpu", "", "8.0")).startswith("Triton has no float8_e4m3fn below")
    wide = dataclasses.replace(call, lhs=dataclasses.replace(call.lhs, shape=(1, 12, 2**23)))
    assert "K = 8388608" in capability.supports_forward(wide, H200)
    tall = dataclasses.replace(call, lhs=dataclasses.replace(call.lhs, shape=(2**14, 2**20, 32)))
    assert "programs" in capability.supports_backward(tall, H200)
    assert "out_dtype is float64" in capability.supports_forward(dataclasses.replace(call, out_dtype="float64"), H200)


def test_a_size_that_no_dot_takes():
    with pytest.raises(ValueError, match="block_k: got 16, expected a power of two of at least 32"):
        Config(16, 16, 16, 4, 2)
