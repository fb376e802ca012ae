"""`paged_attention` of many new tokens in CUDA C++ on a machine without a GPU: the handler's checks, refusals, lowering."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_calls import check_target

import ejkernel
from ejkernel.operations.paged_attention.interface import OPERATION
from ejkernel.plugin import Target
from ejkernel_cuda import _library
from ejkernel_cuda.paged_prefill import capability, config

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_library = pytest.mark.skipif(not _library.PATH.is_file(), reason="build the library: pip install with nvcc 13")
PAGES = (1, 4, 16, 2, 24)
ARRAYS = {
    "query": ((1, 9, 4, 24), jnp.bfloat16), "key_pages": (PAGES, jnp.bfloat16), "value_pages": (PAGES, jnp.bfloat16),
    "starts": ((1, 3), jnp.int32), "lengths": ((1, 2), jnp.int32), "tables": ((1, 2, 2), jnp.int32), "sinks": ((1, 0), jnp.float32),
}  # fmt: skip
RESULTS = {"out": ((1, 9, 4, 24), jnp.bfloat16), "lse": ((1, 9, 4), jnp.float32)}
ATTRIBUTES = {
    "key_strides": (768, 48, 24, 0), "value_strides": (768, 48, 24, 0), "first_value": 0, "key_heads": 2, "key_size": 24,
    "value_size": 24, "pages": 4, "page_size": 16, "window": 0, "pack": 2,
}  # fmt: skip


def check(fused=False, scale=0.5, cap=0.0, **changes):
    arrays = {name: changes.pop(name, default) for name, default in ARRAYS.items()}
    results = [jax.ShapeDtypeStruct(*changes.pop(name, default)) for name, default in RESULTS.items()]
    attributes = {name: np.array(value, np.int64) for name, value in {**ATTRIBUTES, **changes}.items()}
    attributes = {name: value if value.ndim else np.int64(value) for name, value in attributes.items()}
    call = jax.ffi.ffi_call(check_target("paged_prefill_forward"), results)
    numbers = {"scale": np.float32(scale), "cap": np.float32(cap), "fused": fused, "causal": True}
    return jax.block_until_ready(call(*(jnp.zeros(*value) for value in arrays.values()), **attributes, **numbers))


@needs_library
def test_handler_admits_the_contract():
    check()
    check(lse=((0,), jnp.float32), sinks=((1, 4), jnp.float32), cap=3.0)
    check(fused=True, value_pages=((0,), jnp.bfloat16), first_value=24, value_strides=(384, 24, 24, 0))
    check(window=2**30, pack=1, key_size=20, value_size=17)
    check(key_strides=(768, 24, 384, 0), value_strides=(768, 24, 384, 0))


@needs_library
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": ((1, 9, 4, 24), jnp.float32)}, "query must be bfloat16 or float16"),
        ({"key_pages": (PAGES, jnp.int8)}, "pages and out must be of the query's type"),
        ({"out": ((1, 9, 4, 24), jnp.float16)}, "pages and out must be of the query's type"),
        ({"query": ((9, 4, 24), jnp.bfloat16)}, r"query must be \[batch, tokens, heads, size\]"),
        ({"query": ((1, 8, 4, 24), jnp.bfloat16)}, r"got \[1, 8, 4, 24\] and \[1, 9, 4, 24\]"),
        ({"key_size": 0}, "heads must have 1 ... 256 elements"),
        ({"key_size": 16}, "rounded up to a multiple of 8"),
        ({"value_size": 25}, "rounded up to a multiple of 8"),
        ({"key_heads": 3}, "key_heads must divide the heads of query .* got 3"),
        ({"pack": 4}, "pack must be a power of two up to 64 that divides the 2 query heads of a key head, got 4"),
        ({"lse": ((1, 9, 2), jnp.float32)}, r"lse must be \[batch, tokens, heads\] of query .* got \[1, 9, 2\]"),
        ({"sinks": ((1, 2), jnp.float32)}, r"sinks must be \[1 or batch, 0 or 4\], got \[1, 2\]"),
        ({"starts": ((1, 2), jnp.int32)}, r"starts must be .* got \[1, 2\]"),
        ({"tables": ((1, 3, 2), jnp.int32)}, r"tables must be .* got \[1, 3, 2\]"),
        ({"key_strides": (776, 48, 24, 0)}, "key strides reach element 3095 of pages"),
        ({"value_strides": (768, 48, -24, 0)}, "value strides reach"),
        ({"page_size": 12}, "pages whose size is a multiple of 8, got 4 of 12"),
        ({"pages": 0}, "pages whose size is a multiple of 8, got 0 of 16"),
        ({"key_strides": (768, 48, 20, 0)}, r"strides of pages must be multiples of 8 elements, got \[768, 48, 20, 0\]"),
        ({"first_value": 4, "value_strides": (760, 40, 16, 0)}, "first_value must be a multiple of 8"),
        ({"window": -1}, "window must be 0 ... 2\\^30, got -1"),
        ({"scale": np.inf}, "scale and cap must be finite"),
        ({"cap": -1.0}, "cap not negative"),
    ],
)
def test_handler_refuses(changes, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        check(**changes)


def call_of(stored="bfloat16", new="bfloat16", *, tokens=90, requests=3, heads=4, size=64, table=8, page_size=16, **options):
    pages = jax.ShapeDtypeStruct((4, page_size, 2, size), jnp.dtype(stored))
    query = jax.ShapeDtypeStruct((tokens, heads, size), jnp.dtype(new))
    described = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((requests + 1,), (requests,), (requests, table))]
    found = []
    jax.eval_shape(lambda *given: found.append(OPERATION.canonicalise(*given, **options).call), query, pages, pages, *described)
    return found[0]


@needs_library
@pytest.mark.parametrize(
    ("call", "target", "reason"),
    [
        (lambda: call_of(), Target("gpu", "NVIDIA A100", "8.0"), r"needs compute capability 9.0 \(Hopper\)"),
        (lambda: call_of(), Target("cpu", "cpu"), "needs an NVIDIA GPU"),
        (lambda: call_of("float32", "float32"), H200, "query is float32"),
        (lambda: call_of("int8"), H200, "pages of int8 with queries of bfloat16"),
        (lambda: call_of(size=264), H200, "heads of 264 and 264 elements"),
        (lambda: call_of(size=36), H200, "heads of pages 36 elements wide, TMA needs a multiple of 8"),
        (lambda: call_of(page_size=4), H200, "4 pages of 4 tokens, needs some whose tokens are a multiple of 8"),
        (lambda: call_of(softmax_scale=1e35), H200, "scale 1e[+]35 is beyond"),
        (lambda: call_of("float16", "float16", logits_soft_cap=5.0), H200, "logits_soft_cap is 5.0 with float16"),
        (lambda: call_of(logits_soft_cap=1e-50), H200, "soft_cap 1e-50 is not within"),
        (lambda: call_of(table=2**20, page_size=2**11), H200, "tables name up to 2147483648 keys"),
        (lambda: call_of(tokens=2**24, heads=256), H200, "may need 4294968576 blocks"),
    ],
)
def test_refusals(call, target, reason):
    found = capability.supports_forward(call(), target)
    assert found is not None
    assert re.search(reason, found), found


@needs_library
def test_supports():
    assert capability.supports_forward(call_of(), H200) is None
    assert capability.supports_forward(call_of("float16", "float16", size=256, page_size=128), H200) is None


def test_configs():
    assert config.FORWARD.heuristic(call_of(), H200) == config.PrefillConfig(pack_gqa=True)
    assert config.FORWARD.search_space(call_of(), H200) == [config.PrefillConfig(True), config.PrefillConfig(False)]
    assert config.FORWARD.search_space(call_of(heads=2), H200) == [config.PrefillConfig(False)]
    assert config.packed_heads(call_of(heads=24)) == 4


@needs_library
def test_dispatched_by_name_for_a_gpu():
    """A platform's name takes the kernel for the call: for decoding, and for prompts."""

    def attend(query, pages, lengths, tables, starts):
        return ejkernel.unified_attention(query, pages, pages, lengths, tables, starts, platform="cuda")

    def program(tokens):
        query, pages = jax.ShapeDtypeStruct((tokens, 4, 64), jnp.bfloat16), jax.ShapeDtypeStruct((4, 16, 2, 64), jnp.bfloat16)
        described = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3,), (3, 2), (4,))]
        with ejkernel.use(target=H200):
            return jax.jit(attend).trace(query, pages, *described).lower(lowering_platforms=("cuda",)).as_text()

    decoding, prompts = program(3), program(100)
    assert "ejkernel_cuda_paged_attention_forward" in decoding and "paged_prefill" not in decoding
    assert prompts.count("@ejkernel_cuda_paged_prefill_forward") == 1 and "paged_attention_forward" not in prompts
