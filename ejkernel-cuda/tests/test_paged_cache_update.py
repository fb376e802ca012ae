"""`paged_cache_update` in CUDA C++ on a machine without a GPU: the handler's checks, refusals, and lowering in place."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_calls import check_target

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.paged_cache_update.interface import OPERATION
from ejkernel.plugin import Target
from ejkernel_cuda import _library
from ejkernel_cuda.paged_cache_update import capability, config, kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_library = pytest.mark.skipif(not _library.PATH.is_file(), reason="build the library: pip install with nvcc 13")
PAGES = (1, 4, 2, 2, 8)
ARRAYS = {
    "key": ((1, 3, 2, 8), jnp.float32), "value": ((1, 3, 2, 8), jnp.float32), "starts": ((1, 3), jnp.int32),
    "lengths": ((1, 2), jnp.int32), "tables": ((1, 2, 2), jnp.int32), "key_scale": ((1, 0), jnp.float32),
    "value_scale": ((1, 2), jnp.float32), "key_pages": (PAGES, jnp.float8_e4m3fn), "value_pages": (PAGES, jnp.float8_e4m3fn),
}  # fmt: skip
ATTRIBUTES = {
    "key_strides": (32, 16, 8, 128), "value_strides": (32, 16, 8, 128), "first_value": 0, "pages": 4, "page_size": 2,
    "threads": 64, "tokens": 2,
}  # fmt: skip


def check(fused=False, **changes):
    arrays = {name: changes.pop(name, default) for name, default in ARRAYS.items()}
    results = changes.pop("results", (arrays["key_pages"], arrays["value_pages"]))
    attributes = {name: np.array(value, np.int64) for name, value in {**ATTRIBUTES, **changes}.items()}
    attributes = {name: value if value.ndim else np.int64(value) for name, value in attributes.items()}
    call = jax.ffi.ffi_call(check_target("paged_cache_update_forward"), tuple(jax.ShapeDtypeStruct(*one) for one in results))
    return jax.block_until_ready(call(*(jnp.zeros(*value) for value in arrays.values()), **attributes, fused=fused))


@needs_library
def test_handler_admits_the_contract():
    check()
    check(key=((1, 3, 2, 8), jnp.float8_e4m3fn), value=((1, 3, 2, 5), jnp.bfloat16))
    check(fused=True, value_pages=((0,), jnp.float8_e4m3fn), key_strides=(32, 16, 8, 128), first_value=0)


@needs_library
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": ((3, 2, 8), jnp.float32)}, r"key must be \[batch, tokens, heads, size\]"),
        ({"value": ((1, 4, 2, 8), jnp.float32)}, r"value must be .* as key \[1, 3, 2, 8\], got \[1, 4, 2, 8\]"),
        ({"key": ((1, 3, 2, 8), jnp.int8)}, "key must be float32, bfloat16 or float16"),
        ({"value": ((1, 3, 2, 8), jnp.float8_e4m3fn)}, "value must be float32"),
        ({"key_scale": ((1, 3), jnp.float32)}, r"key's scale must be .* got \[1, 3\]"),
        ({"value_pages": (PAGES, jnp.int8)}, "one type"),
        ({"key_pages": (PAGES, jnp.int32), "value_pages": (PAGES, jnp.int32)}, "pages must be float32"),
        ({"starts": ((1, 2), jnp.int32)}, r"starts must be .* got \[1, 2\]"),
        ({"lengths": ((2, 2), jnp.int32)}, r"lengths must be .* got \[2, 2\]"),
        ({"tables": ((1, 3, 2), jnp.int32)}, r"tables must be .* got \[1, 3, 2\]"),
        ({"key_strides": (33, 16, 8, 128)}, "key strides reach element 130 of pages"),
        ({"first_value": 1}, "value strides reach element 128 of pages"),
        ({"value_strides": (32, 16, -8, 128)}, "value strides reach"),
        ({"key_strides": (32, 16, 8)}, "key strides must be of page, token, head and batch"),
        ({"pages": -1}, "must not be negative"),
        ({"threads": 16}, "threads must be a power of two, 32 ... 512, got 16"),
        ({"tokens": 33}, "tokens must be 1 ... 32, got 33"),
        ({"tokens": 0}, "tokens must be 1 ... 32, got 0"),
        ({"results": ((PAGES, jnp.int8), (PAGES, jnp.float8_e4m3fn))}, "key_out must be like key_pages"),
    ],
)
def test_handler_refuses(changes, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        check(**changes)


def call_of(stored="int8", new="bfloat16"):
    pages, fresh = jnp.zeros(PAGES[1:], stored), jnp.zeros((3, 2, 8), new)
    described = {
        "query_start_loc": jnp.array([0, 1, 3]),
        "kv_lens": jnp.array([1, 2]),
        "block_tables": jnp.zeros((2, 2), jnp.int32),
    }
    return OPERATION.canonicalise(fresh, fresh, pages, pages, **described, k_scale=0.5).call


@needs_library
def test_supports():
    call = call_of()
    assert capability.supports_forward(call, H200) is None
    assert capability.supports_forward(call_of("float8_e4m3fn"), Target("gpu", "A100", "8.0")) is None
    double = dataclasses.replace(call, key=ArraySpec((1, 3, 2, 8), "float64"))
    assert "key is float64" in capability.supports_forward(double, H200)
    many = dataclasses.replace(call, key=ArraySpec((1, 1 << 31, 2, 8), "bfloat16"))
    assert "2147483648 tokens" in capability.supports_forward(many, H200)
    wide = dataclasses.replace(call, key=ArraySpec((1, 1, 1 << 16, 1 << 16), "bfloat16"))
    assert "4294967296 elements of one token" in capability.supports_forward(wide, H200)


def test_configs():
    space = config.FORWARD.search_space(call_of(), H200)
    assert len(space) == len(set(space)) == 18
    prompt = dataclasses.replace(call_of(), key=ArraySpec((1, 8192, 8, 128), "bfloat16"))
    longest = dataclasses.replace(call_of(), key=ArraySpec((4, 16384, 8, 128), "bfloat16"))
    assert [config.FORWARD.heuristic(call, H200).tokens for call in (call_of(), prompt, longest)] == [1, 8, 32]
    assert space[0] == config.FORWARD.heuristic(call_of(), H200)


@needs_library
def test_lowers_in_place():
    def directly(key_pages, value_pages, new, starts, lengths, tables):
        bound = OPERATION.canonicalise(new, new, key_pages, value_pages, starts, lengths, tables)
        return kernel.forward(bound.call, bound.inputs, config.PagedCacheUpdateConfig(64, 2))

    pages, integers = jax.ShapeDtypeStruct((4, 2, 2, 8), jnp.bfloat16), jnp.int32
    described = [jax.ShapeDtypeStruct(shape, integers) for shape in ((3,), (2,), (2, 2))]
    new = jax.ShapeDtypeStruct((3, 2, 8), jnp.bfloat16)
    with ejkernel.use(target=H200):
        traced = jax.jit(directly, donate_argnums=(0, 1)).trace(pages, pages, new, *described)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@ejkernel_cuda_paged_cache_update_forward") == 1
    assert text.count("output_operand_alias<") == 2
    # XLA must not join the call with slices around it, as its results then alias nothing
    call = re.search(r"(%\w+):2 = stablehlo.custom_call @ejkernel_cuda_paged_cache_update_forward\(([^)]*)\)", text)
    before, after = re.findall(r"(%\w+):\d+ = stablehlo.optimization_barrier ([^:]*) :", text)
    assert call and {operand.partition("#")[0] for operand in call[2].split(", ")} == {before[0]}
    assert after[1] == f"{call[1]}#0, {call[1]}#1"
