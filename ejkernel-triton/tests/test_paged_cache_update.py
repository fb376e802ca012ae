"""`paged_cache_update` in Triton on a machine without a GPU: bits in the interpreter, machine code, caches in place."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.paged_cache_update.cases import CASES
from ejkernel.operations.paged_cache_update.interface import OPERATION, PagedCacheUpdateInputs
from ejkernel.operations.paged_cache_update.reference import forward as reference
from ejkernel.plugin import Target
from ejkernel_triton._versions import version_problem
from ejkernel_triton.paged_cache_update import capability, config
from ejkernel_triton.paged_cache_update.config import PagedCacheUpdateConfig

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import _interpreter, testing
from ejkernel_triton._jax_triton import intercept_launches
from ejkernel_triton.paged_cache_update import kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")
SMALL = [case for case in CASES if "bench" not in case.tags]


def run(bound, chosen=None):
    with intercept_launches(_interpreter.interpreted_call):
        return kernel.forward(bound.call, bound.inputs, chosen or config.heuristic(bound.call, H200))


def same_bits(got, wanted):
    """Equal bit by bit, apart from which NaN it is."""
    got, wanted = np.asarray(got), np.asarray(wanted)
    equal = got.view(f"u{got.itemsize}") == wanted.view(f"u{wanted.itemsize}")
    both_nan = np.isnan(got.astype(np.float32)) & np.isnan(wanted.astype(np.float32))
    return got.dtype == wanted.dtype and bool((equal | both_nan).all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_cases_in_the_interpreter(case, dtype):
    """Against float64; what a rounding of the quotient to float32 decides is one step of the pages' dtype."""
    arrays = {name: jnp.asarray(array) for name, array in case.arrays(np.random.default_rng(0)).items()}
    arrays |= {name: arrays[name].astype(dtype) for name in ("key", "value")}
    bound = OPERATION.canonicalise(**arrays, **case.options)
    wide = [None if v is None else np.asarray(v, None if v.dtype == jnp.int32 else np.float64) for v in bound.inputs]
    exact = reference(bound.call, PagedCacheUpdateInputs(*wide))
    for got, wanted in zip(run(bound), exact, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=3e-7)


NUMBERS = np.float32([
    0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 128, -128.5, -129, 447, 448, 464, 465, 480, 57344, 61440, 65536, 1e30, -1e30,
    np.inf, -np.inf, np.nan, 2**-6, 2**-7, 2**-9, 2**-10, 3 * 2**-10, 2**-11, 2**-14, 2**-16, 2**-17, 1e-40,
])  # fmt: skip


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_rounding_is_to_nearest_and_saturates(stored):
    """Halves between neighbours, subnormal numbers, both ends of the range, and 8192 random patterns of bits."""
    rng = np.random.default_rng(1)
    patterns = rng.integers(0, 2**32, 4096, dtype=np.uint32).view(np.float32)
    halves = np.float32(2.0) ** rng.integers(-20, 18, 4096) * rng.integers(-64, 64, 4096) / 32
    with np.errstate(invalid="ignore"):
        numbers = np.concatenate([NUMBERS, patterns, halves.astype(np.float32)])
    new = jnp.asarray(np.pad(numbers, (0, -len(numbers) % 1024)).reshape(-1, 1, 1024))
    count = len(new)
    pages = jnp.zeros((count, 1, 1, 1024), stored)
    tables, ends = jnp.arange(count, dtype=jnp.int32)[None], jnp.array([0, count], jnp.int32)
    bound = OPERATION.canonicalise(new, new, pages, pages, ends, ends[1:], tables)
    if stored == "int8":
        wanted = np.clip(np.round(np.where(np.isnan(new), 0, new)), -128, 127).astype(np.int8)
    else:
        largest = float(jnp.finfo(stored).max)
        wanted = jnp.asarray(np.clip(np.asarray(new), -largest, largest)).astype(stored)
    got = run(bound, PagedCacheUpdateConfig(1, 4))
    assert same_bits(got.key_pages.reshape(new.shape), wanted)
    assert same_bits(got.value_pages.reshape(new.shape), wanted)


def test_scales_divide_as_ieee_asks():
    rng = np.random.default_rng(2)
    new, scale = rng.standard_normal((40, 2, 64)).astype(np.float32), np.array([0.3, 0.07], np.float32)
    pages = jnp.zeros((40, 1, 2, 64), jnp.float32)
    tables, ends = jnp.arange(40, dtype=jnp.int32)[None], jnp.array([0, 40], jnp.int32)
    got = run(OPERATION.canonicalise(new, new, pages, pages, ends, ends[1:], tables, scale, scale))
    np.testing.assert_array_equal(got.key_pages[0, :, 0], new / scale[:, None])


def test_what_is_outside_writes_nothing():
    """A negative page, one beyond the last, a position beyond the table, one below 0, and a token of no request."""
    pages = jnp.arange(4 * 2 * 1 * 4, dtype=jnp.float32).reshape(4, 2, 1, 4)
    new = jnp.full((6, 1, 4), -1.0)
    starts, lengths = jnp.array([0, 1, 2, 3, 5], jnp.int32), jnp.array([1, 1, 5, 1], jnp.int32)
    tables = jnp.array([[-1, 0], [4, 1], [2, 3], [3, 2]], jnp.int32)
    got = run(OPERATION.canonicalise(new, new, pages, pages, starts, lengths, tables))
    wanted = np.array(pages)
    wanted[3, 0] = -1  # the second of two new tokens with one key in all is at position 0
    np.testing.assert_array_equal(got.key_pages[0], wanted)
    np.testing.assert_array_equal(got.value_pages[0], wanted)


@pytest.mark.parametrize("chosen", [PagedCacheUpdateConfig(h, w) for h, w in ((1, 1), (2, 4), (8, 2))], ids=str)
def test_no_config_changes_the_numbers(chosen):
    rng = np.random.default_rng(3)
    new = jnp.asarray(rng.standard_normal((3, 6, 24)), jnp.bfloat16)
    pages = jnp.asarray(rng.standard_normal((4, 5, 6, 24)), jnp.bfloat16)
    tables = jnp.array([[2, 0]], jnp.int32)
    got = run(OPERATION.canonicalise(new, new, pages, pages, jnp.array([0, 3]), jnp.array([7]), tables), chosen)
    wanted = np.array(pages)
    wanted[2, 4], wanted[0, :2] = new[0], new[1:]
    assert same_bits(got.key_pages[0], wanted)


@pytest.mark.parametrize("capability_number", [80, 90, 100])
@pytest.mark.parametrize("stored", ["bfloat16", "int8", "float8_e5m2"])
def test_compiles_without_spills(triton_cache, stored, capability_number):
    call, inputs = shapes(stored)
    recorder = testing.Recorder()
    with intercept_launches(recorder):
        jax.eval_shape(lambda inputs: kernel.forward(call, inputs, config.heuristic(call, H200)), inputs)
    (compilation,) = recorder.compilations
    assert testing.stack_bytes(compilation.compile(capability_number)) <= testing.tolerated_stack()


def shapes(stored, tokens=64):
    def make():
        new, pages = jnp.zeros((tokens, 8, 128), jnp.bfloat16), jnp.zeros((64, 16, 8, 128), stored)
        lengths = jnp.zeros(tokens + 1, jnp.int32), jnp.zeros(tokens, jnp.int32), jnp.zeros((tokens, 256), jnp.int32)
        bound = OPERATION.canonicalise(new, new, pages, pages, *lengths)
        found.append(bound.call)
        return bound.inputs

    found = []
    inputs = jax.eval_shape(make)
    return found[0], inputs


@needs_jax_triton
@pytest.mark.parametrize(("layout", "shape"), [("pthd", (64, 16, 8, 128)), ("hptd", (8, 64, 16, 128))])
def test_donated_caches_are_the_results(layout, shape):
    """The call writes into its operands, and the program gives them the memory of its arguments."""
    spec = jax.ShapeDtypeStruct
    new, pages = spec((4, 8, 128), jnp.bfloat16), spec(shape, jnp.bfloat16)
    requests = spec((4,), jnp.int32), spec((4, 16), jnp.int32), spec((5,), jnp.int32)
    update = functools.partial(ejkernel.paged_cache_update, layout=layout, platform="triton")
    with ejkernel.use(target=H200):
        traced = jax.jit(update, donate_argnums=(2, 3)).trace(new, new, pages, pages, *requests)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    call = next(line for line in text.splitlines() if "triton_kernel_call" in line)
    assert call.count("output_operand_alias<") == 2
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == 2


@needs_jax_triton
def test_supports_refuses_with_numbers():
    call, _ = shapes("bfloat16")

    def ask(target=H200, **changes):
        return capability.supports_forward(dataclasses.replace(call, **changes), target)

    assert ask() is None
    assert "the target is cpu" in ask(Target("cpu"))
    assert "key is float64" in ask(key=ArraySpec((1, 64, 8, 128), "float64"))
    assert "16384 is above 8192" in ask(key=ArraySpec((1, 64, 8, 16384), "bfloat16"))
    assert "more than 2147483647 programs" in ask(key=ArraySpec((1, 2**29, 8, 128), "bfloat16"))
    e4m3 = {"key_pages": ArraySpec((1, 64, 16, 8, 128), "float8_e4m3fn")}
    assert ask(**e4m3) is None
    assert "8.9" in ask(Target("gpu", "", "8.0"), **e4m3)
