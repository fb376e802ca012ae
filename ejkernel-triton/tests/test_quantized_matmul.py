"""`quantized_matmul` in Triton on a machine without a GPU: numbers in the interpreter, refusals, machine code ahead of time."""

from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from both_phases import check_phases

from ejkernel.call import ArraySpec
from ejkernel.operations.quantized_matmul import reference
from ejkernel.operations.quantized_matmul.cases import CASES, grouped_arrays, packed
from ejkernel.operations.quantized_matmul.interface import (
    OPERATION,
    QuantizedMatmulCall,
    QuantizedMatmulInputs,
    QuantizedMatmulOutputs,
)
from ejkernel.plugin import Target
from ejkernel.quantization.codes import NF4
from ejkernel.testing.checks import widened
from ejkernel.utils.tolerance import deviation
from ejkernel_triton._ahead_of_time import recorded, target_of
from ejkernel_triton._interpret import INTERPRET
from ejkernel_triton._versions import version_problem
from ejkernel_triton.quantized_matmul import capability, gradients
from ejkernel_triton.quantized_matmul.config import BACKWARD, FORWARD, Config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton.quantized_matmul import kernel, tiles

pytestmark = pytest.mark.usefixtures("interpreted")

H200 = Target("gpu", "NVIDIA H200", "9.0")
SMALL = [case for case in CASES if not case.tags & {"bench", "bench-cpu"}]
TILES = {
    "one": Config(16, 16, 16, 1, 1, 1),
    "sections": Config(16, 16, 16, 3, 1, 1),
    "unpacked": Config(16, 16, 8, 1, 1, 1, unpack=True),
}
FORMATS = [
    *(("affine", bits, group) for bits, group in ((2, 32), (3, 32), (3, 16), (4, 32), (5, 64), (6, 16), (7, 7), (8, 32))),
    *(("nf4", 4, 32), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16), ("nvfp8", 8, 16)),
]


def bound_of(arrays, options, dtype="float32"):
    made = {name: np.asarray(value) for name, value in arrays.items()}
    made = {name: jnp.asarray(x, dtype if x.dtype == np.float32 else x.dtype) for name, x in made.items()}
    bound = OPERATION.canonicalise(**made, **options)
    return bound.call, bound.inputs


def drawn(rows, inner, columns, mode, bits, group, *, transpose=False, dtype="float32"):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((rows, inner)) / inner**0.5).astype(np.float32)
    stored = (columns, inner) if transpose else (inner, columns)
    arrays = {"x": x, **packed(rng, *stored, mode, bits, group)}
    return bound_of(arrays, {"mode": mode, "bits": bits, "group_size": group, "transpose": transpose}, dtype)


def check(call, inputs, choice, limits=(2e-6, 1e-5)):
    outputs, _ = check_phases(OPERATION, kernel, call, inputs, (choice, choice), limits)
    assert outputs.out.dtype == inputs.x.dtype


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("choice", TILES.values(), ids=TILES)
def test_every_case(case, choice):
    check(*bound_of(case.arrays(np.random.default_rng(0)), case.options), choice)


@pytest.mark.parametrize("mapped", [("x",), ("x", "w"), ("x", "scales"), ("x", "w", "scales", "zeros")], ids="-".join)
@pytest.mark.parametrize("choice", TILES.values(), ids=TILES)
def test_weights_of_every_member(mapped, choice):
    """What `jax.vmap` makes: members share an array or have their own."""
    call, inputs = drawn(3, 40, 32, "affine", 4, 16)
    several = {
        name: jnp.concatenate([array, array[:, ::-1]]) if name in mapped else array
        for name, array in inputs._asdict().items()
        if array is not None
    }
    specs = {name: dataclasses.replace(getattr(call, name), shape=array.shape) for name, array in several.items()}
    call, inputs = dataclasses.replace(call, **specs), QuantizedMatmulInputs(**several)
    each = [
        QuantizedMatmulInputs(**{name: array[member % array.shape[0]][None] for name, array in several.items()})
        for member in range(2)
    ]
    outputs = kernel.forward(call, inputs, choice)
    exact = [reference.forward(call, widened(own)) for own in each]
    assert deviation(outputs.out, np.concatenate([own.out for own in exact])).norm < 2e-6
    grad = jnp.cos(jnp.arange(float(outputs.out.size))).reshape(outputs.out.shape)
    found = kernel.backward(call, inputs, outputs, QuantizedMatmulOutputs(grad), choice)
    wanted = [
        reference.backward(call, widened(own), out, QuantizedMatmulOutputs(np.asarray(grad[member][None], np.float64)))
        for member, (own, out) in enumerate(zip(each, exact, strict=True))
    ]
    for name in ("x", "scales", "zeros"):
        parts = np.concatenate([getattr(own, name) for own in wanted])
        like = parts if name in mapped else parts.sum(axis=0, keepdims=True)
        assert deviation(getattr(found, name), like).norm < 1e-5, name


def test_groups_of_every_member():
    """What `jax.vmap` makes of rows in groups: members have sizes of their own, and share the codes or have their own."""
    (case,) = (case for case in CASES if case.name == "grouped-shard")
    one, inputs = bound_of(case.arrays(np.random.default_rng(0)), case.options)
    arrays = {
        **inputs._asdict(),
        "x": jnp.concatenate([jnp.nan_to_num(inputs.x), jnp.nan_to_num(inputs.x)[:, ::-1]]),
        "scales": jnp.concatenate([inputs.scales, 2 * inputs.scales]),
        "group_sizes": jnp.asarray([[5, 6, 7, 8, 9], [0, 35, 0, 0, 0]], jnp.int32),
        "group_offset": jnp.asarray([3, 0], jnp.int32),
    }
    specs = {name: dataclasses.replace(getattr(one, name), shape=array.shape) for name, array in arrays.items()}
    call, inputs = dataclasses.replace(one, **specs), QuantizedMatmulInputs(**arrays)
    for choice in TILES.values():
        outputs = kernel.forward(call, inputs, choice)
        grad = QuantizedMatmulOutputs(jnp.cos(jnp.arange(float(outputs.out.size))).reshape(outputs.out.shape))
        found = kernel.backward(call, inputs, outputs, grad, choice)
        summed = 0
        for member in range(2):
            own = QuantizedMatmulInputs(*(array[member % len(array)][None] for array in widened(inputs)))
            exact = reference.forward(one, own)
            wanted = reference.backward(one, own, exact, QuantizedMatmulOutputs(widened(grad).out[member][None]))
            assert deviation(outputs.out[member], exact.out[0]).norm < 2e-6
            assert deviation(found.x[member], wanted.x[0]).norm < 1e-5
            assert deviation(found.scales[member], wanted.scales[0]).norm < 1e-5
            summed = summed + wanted.zeros
        assert deviation(found.zeros, summed).norm < 1e-5


@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS, ids=lambda value: str(value))
@pytest.mark.parametrize("transpose", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("unpack", [False, True], ids=["packed", "unpacked"])
def test_every_format_in_groups(mode, bits, group, transpose, unpack):
    """Groups of more rows than a tile, empty ones, rows past the sum; sections; the gradient of x."""
    size = 7 * 12 if group == 7 else 64
    inner, columns = (size, 24) if transpose else (24, size)
    make = grouped_arrays(45, inner, columns, (3, 0, 19, 0, 20), (mode, bits, group), transpose=transpose)
    options = {"mode": mode, "bits": bits, "group_size": group, "transpose": transpose}
    call, inputs = bound_of(make(np.random.default_rng(0)), options, "bfloat16")
    outputs = kernel.forward(call, inputs, Config(16, 16, 16 if transpose else 8, 2, 1, 1, unpack))
    exact = reference.forward(call, widened(inputs))
    assert deviation(outputs.out, exact.out).norm < 8e-3
    assert (np.asarray(outputs.out[0, 42:], np.float32) == 0).all()
    grad = QuantizedMatmulOutputs(jnp.asarray(np.cos(np.arange(exact.out.size)).reshape(exact.out.shape), "bfloat16"))
    found = kernel.backward(call, inputs, outputs, grad, Config(16, 16, 8 if transpose else 16, 2, 1, 1, unpack))
    assert deviation(found.x, reference.backward(call, widened(inputs), exact, widened(grad)).x).norm < 1.6e-2


def test_matrices_of_empty_groups_are_not_read():
    """Their scales may be anything: here every one that is read is finite."""
    make = grouped_arrays(19, 24, 64, (0, 19, 0), ("affine", 4, 32))
    call, inputs = bound_of(make(np.random.default_rng(0)), {"mode": "affine", "group_size": 32})
    hidden = inputs._replace(scales=inputs.scales.at[0, ::2].set(jnp.nan), zeros=inputs.zeros.at[0, ::2].set(jnp.nan))
    for choice in TILES.values():
        want = kernel.forward(call, inputs, choice).out
        np.testing.assert_array_equal(kernel.forward(call, hidden, choice).out, want)


@pytest.mark.parametrize(("mode", "bits", "group"), FORMATS, ids=lambda value: str(value))
@pytest.mark.parametrize("transpose", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize(("dtype", "limits"), [("bfloat16", (8e-3, 1.6e-2)), ("float16", (1e-3, 2.5e-3))])
def test_every_format_in_16_bits(mode, bits, group, transpose, dtype, limits):
    """Several tiles of each axis, the last of each not full."""
    size = 7 * 24 if group == 7 else 3 * 64
    inner, columns = (size, 24) if transpose else (24, size)
    call, inputs = drawn(18, inner, columns, mode, bits, group, transpose=transpose, dtype=dtype)
    choice = Config(16, 16, 16 if transpose else 8, 2, 1, 1)
    gradient = Config(16, 16, 8 if transpose else 16, 2, 1, 1)
    outputs = kernel.forward(call, inputs, choice)
    exact = reference.forward(call, widened(inputs))
    assert deviation(outputs.out, exact.out).norm < limits[0]
    grad = QuantizedMatmulOutputs(jnp.asarray(np.cos(np.arange(exact.out.size)).reshape(exact.out.shape), dtype))
    found = kernel.backward(call, inputs, outputs, grad, gradient)
    assert deviation(found.x, reference.backward(call, widened(inputs), exact, widened(grad)).x).norm < limits[1]


def test_hidden_numbers_do_not_reach_the_result():
    """Rows of x beside the last tile's, and what lies behind the last word of a row."""
    call, inputs = drawn(3, 20, 48, "affine", 3, 16)
    w = np.asarray(inputs.w).copy()
    used = 48 * 3 % 32
    w[..., -1] |= np.uint32(0xFFFFFFFF << used & 0xFFFFFFFF)
    choice = TILES["sections"]
    want = kernel.forward(call, inputs, choice).out
    np.testing.assert_array_equal(kernel.forward(call, inputs._replace(w=jnp.asarray(w)), choice).out, want)


@pytest.mark.parametrize("mode", ["mxfp8", "nvfp8"])
def test_codes_that_are_not_numbers(mode):
    call, inputs = drawn(2, 16, 32, mode, 8, 32 if mode == "mxfp8" else 16)
    w = np.asarray(inputs.w).copy()
    w[0, 3, 1] |= np.uint32(0x7F)  # the first code of the second word: column 4
    out = np.asarray(kernel.forward(call, inputs._replace(w=jnp.asarray(w)), TILES["one"]).out)
    assert np.isnan(out[..., 4]).all() and np.isfinite(np.delete(out, 4, axis=2)).all()


def test_values_of_nf4_in_bfloat16():
    """A polynomial in the place of the table, within a tenth of what bfloat16 rounds off, and 0 is 0; x is the identity."""
    rng = np.random.default_rng(0)
    arrays = {"x": np.eye(16, dtype=np.float32), **packed(rng, 16, 64, "nf4", 4, 64)}
    arrays["w"] = np.tile(np.array([0x76543210, 0xFEDCBA98], np.uint32), (16, 4))
    arrays["scales"] = np.ones((16, 1), np.float32)
    call, inputs = bound_of(arrays, {"mode": "nf4", "group_size": 64}, "bfloat16")
    found = np.asarray(kernel.forward(call, inputs, TILES["one"]).out[0], np.float64)
    np.testing.assert_allclose(found, np.tile(NF4.astype(np.float64), (16, 4)), rtol=2**-8 + 2e-4, atol=0)
    assert (found[:, 7] == 0).all()


def test_gradients_of_scales_by_blocks_of_rows(monkeypatch):
    """The gradient of large weights is not whole in memory: seven rows at a time here."""
    monkeypatch.setattr(gradients, "_MOST_ELEMENTS", 7 * 32 + 31)
    check(*drawn(3, 40, 32, "affine", 4, 16), TILES["one"])


def test_sections_are_summed_in_order():
    """The same result every time, and no section without a step: 40 rows are three blocks of 16."""
    call, inputs = drawn(2, 40, 32, "affine", 4, 32)
    one = kernel.forward(call, inputs, dataclasses.replace(TILES["sections"], split_k=3)).out
    np.testing.assert_array_equal(kernel.forward(call, inputs, dataclasses.replace(TILES["sections"], split_k=9)).out, one)


def test_what_is_refused():
    call, _ = drawn(2, 16, 32, "affine", 4, 32)
    assert capability.supports_forward(call, H200) is None
    assert "8.0" in capability.supports_forward(call, Target("gpu", "NVIDIA T4", "7.5"))
    wide_call = dataclasses.replace(call, x=dataclasses.replace(call.x, dtype="float64"))
    assert "float64" in capability.supports_backward(wide_call, H200)
    long = dataclasses.replace(call, x=dataclasses.replace(call.x, shape=(1, 2, 2**24)))
    assert "8388608" in capability.supports_forward(long, H200)
    make = grouped_arrays(3, 16, 32, (1,) + (0,) * 4096, ("mxfp4", 4, 32))
    call, _ = bound_of(make(np.random.default_rng(0)), {"mode": "mxfp4"})
    assert "1 x 4097 groups are more than 4096" in capability.supports_forward(call, H200)


@pytest.mark.parametrize("rows", [1, 16, 64, 4096])
def test_enough_programs_and_no_section_without_work(rows):
    """Few rows fill an H100 twice; many rows unpack the weights once."""
    (case,) = (case for case in CASES if case.name == "bench-4096x4096x14336")
    call, _ = dataclasses_of(case, rows)
    chosen = FORWARD.heuristic(call, H200)
    assert chosen.unpack == (rows == 4096)
    if not chosen.unpack:
        tiles = -(-14336 // (chosen.block_periods * 8)) * -(-rows // chosen.block_m)
        assert tiles * chosen.split_k >= 2 * 132
        assert chosen.split_k <= 4096 // chosen.block_rows
    assert len(FORWARD.search_space(call, H200)) <= 12


@pytest.mark.parametrize(("rows", "experts", "unpack"), [(4096, 8, True), (1024, 8, False), (32768, 64, False)])
def test_experts_of_many_rows_unpack_once(rows, experts, unpack):
    """Not where all matrices take more than a GiB."""
    spec = {"x": ((1, rows, 4096), "bfloat16"), "w": ((1, experts, 4096, 1792), "uint32")}
    spec |= dict.fromkeys(("scales", "zeros"), ((1, experts, 4096, 224), "bfloat16"))
    arrays = {name: ArraySpec(*each) for name, each in spec.items()}
    call = QuantizedMatmulCall(**arrays, group_sizes=ArraySpec((1, experts), "int32"), mode="affine", bits=4, group_size=64)
    for space in (FORWARD, BACKWARD):
        assert space.heuristic(call, H200).unpack == unpack
        assert any(choice.unpack for choice in space.search_space(call, H200)) == (experts == 8)


def dataclasses_of(case, rows):
    arrays = {"x": np.zeros((rows, 4096), np.float32), "w": np.zeros((4096, 14336 // 8), np.uint32)}
    arrays |= {name: np.zeros((4096, 14336 // 64), np.float32) for name in ("scales", "zeros")}
    return bound_of(arrays, case.options, "bfloat16")


@pytest.mark.skipif(version_problem() is not None, reason=f"kernels are refused here: {version_problem()}")
@pytest.mark.parametrize("name", ["bench-1x4096x14336", "bench-16x4096x14336"])
def test_codes_are_not_exchanged_between_threads(monkeypatch, triton_cache, name):
    """Words come from shared memory where the MMA wants its operand, both ways round; unpacked weights never go through it."""
    monkeypatch.delenv(INTERPRET)
    (case,) = (case for case in CASES if case.name == name)
    launches = [found for _, found in recorded("quantized_matmul", case, "bfloat16", target_of(90))]
    products = [found for found in launches if found.kernel is tiles.product_kernel]
    assert {found.constants["PACKED_INNER"] for found in products} == {False, True}
    for found in products:
        text = found.compile(90).asm["ttgir"]
        rows, periods = found.constants["BLOCK_R"], found.constants["BLOCK_P"]
        shape = f"{periods}x{rows}" if found.constants["PACKED_INNER"] else f"{rows}x{periods}"
        assert f"tensor<{shape}xbf16, #ttg.dot_op" in text
        assert re.search(rf"local_load .* -> tensor<({rows}x{periods}|{shape})xi32, #(ttg.dot_op|linear)", text)
        assert not re.search(rf"(local_alloc|convert_layout) %.*tensor<({rows}x{periods}|{shape})xbf16", text)
