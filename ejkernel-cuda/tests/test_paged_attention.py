"""`paged_attention` in CUDA C++ on a machine without a GPU: the handler's checks, refusals, configs, and lowering."""

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
from ejkernel_cuda.paged_attention import capability, config, kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
A100 = Target("gpu", "NVIDIA A100", "8.0")
RTX = Target("gpu", "NVIDIA RTX 4090", "8.9")
needs_library = pytest.mark.skipif(not _library.PATH.is_file(), reason="build the library: pip install with nvcc 13")
PAGES = (1, 4, 2, 2, 8)
ARRAYS = {
    "query": ((1, 3, 4, 8), jnp.bfloat16), "key_pages": (PAGES, jnp.int8), "value_pages": (PAGES, jnp.int8),
    "starts": ((1, 3), jnp.int32), "lengths": ((1, 2), jnp.int32), "tables": ((1, 2, 2), jnp.int32),
    "sinks": ((1, 0), jnp.float32), "key_scale": ((1, 2), jnp.float32), "value_scale": ((1, 1), jnp.float32),
}  # fmt: skip
RESULTS = {
    "out": ((1, 3, 4, 8), jnp.bfloat16), "lse": ((1, 3, 4), jnp.float32), "partial": ((5, 2, 1, 2, 64), jnp.float32),
    "partial_stats": ((5, 2, 1, 2, 2), jnp.float32), "splits": ((5, 2), jnp.int32),
}  # fmt: skip
ATTRIBUTES = {
    "key_strides": (32, 16, 8, 0), "value_strides": (32, 16, 8, 0), "first_value": 0, "key_heads": 2, "key_size": 8,
    "pages": 4, "page_size": 2, "window": 0, "stages": 3, "tile_key_heads": 1,
}  # fmt: skip


TMA_PAGES = (1, 4, 8, 4, 128)
TMA = {
    "query": ((1, 3, 16, 128), jnp.bfloat16), "key_pages": (TMA_PAGES, jnp.int8), "value_pages": (TMA_PAGES, jnp.int8),
    "key_scale": ((1, 4), jnp.float32), "out": ((1, 3, 16, 128), jnp.bfloat16), "lse": ((0,), jnp.float32),
    "partial": ((5, 2, 1, 16, 128), jnp.float32), "partial_stats": ((5, 2, 1, 16, 2), jnp.float32), "key_heads": 4, "key_size": 128,
    "key_strides": (4096, 512, 128, 0), "value_strides": (4096, 512, 128, 0), "page_size": 8, "tile_key_heads": 4, "tma": True,
}  # fmt: skip
"""A call with TMA loads."""


def check(fused=False, scale=0.5, soft_cap=0.0, tma=False, **changes):
    arrays = {name: changes.pop(name, default) for name, default in ARRAYS.items()}
    results = [jax.ShapeDtypeStruct(*changes.pop(name, default)) for name, default in RESULTS.items()]
    attributes = {name: np.array(value, np.int64) for name, value in {**ATTRIBUTES, **changes}.items()}
    attributes = {name: value if value.ndim else np.int64(value) for name, value in attributes.items()}
    numbers = {"scale": np.float32(scale), "soft_cap": np.float32(soft_cap), "fused": fused, "causal": True, "tma": tma}
    call = jax.ffi.ffi_call(check_target("paged_attention_forward"), results)
    return jax.block_until_ready(call(*(jnp.zeros(*value) for value in arrays.values()), **attributes, **numbers))


@needs_library
def test_handler_admits_the_contract():
    check()
    check(lse=((0,), jnp.float32), sinks=((1, 4), jnp.float32))
    check(key_pages=(PAGES, jnp.bfloat16), value_pages=(PAGES, jnp.bfloat16))
    check(fused=True, value_pages=((0,), jnp.int8))
    check(pages=0, window=2**30, soft_cap=3.0)
    check(key_size=6)
    check(tile_key_heads=2, partial=((5, 2, 1, 4, 64), jnp.float32), partial_stats=((5, 2, 1, 4, 2), jnp.float32))
    check(**TMA)
    one = {"tile_key_heads": 1, "partial": ((5, 2, 4, 4, 128), jnp.float32), "partial_stats": ((5, 2, 4, 4, 2), jnp.float32)}
    check(**{**TMA, **one, "key_strides": (4096, 128, 1024, 0), "value_strides": (4096, 128, 1024, 0)})


@needs_library
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": ((1, 3, 4, 8), jnp.float32)}, "query must be bfloat16 or float16"),
        ({"query": ((3, 4, 8), jnp.bfloat16)}, r"query must be \[batch, tokens, heads, size\]"),
        ({"query": ((1, 2, 4, 8), jnp.bfloat16)}, r"query must be .* got \[1, 2, 4, 8\] and \[1, 3, 4, 8\]"),
        ({"key_size": 9}, r"query \[1, 3, 4, 8\] must have key_size rounded up to a multiple of 4, got 9"),
        ({"key_size": 4}, "must have key_size rounded up"),
        ({"query": ((1, 3, 4, 257), jnp.bfloat16)}, r"heads must have 1 ... 256 elements, got \[1, 3, 4, 257\]"),
        ({"out": ((1, 3, 4, 8), jnp.float16)}, "out must be of the query's type"),
        ({"key_pages": (PAGES, jnp.float16), "value_pages": (PAGES, jnp.float16)}, "pages must be of the query's type"),
        ({"value_pages": (PAGES, jnp.float8_e5m2)}, "one type"),
        ({"starts": ((1, 2), jnp.int32)}, r"starts must be .* got \[1, 2\]"),
        ({"lengths": ((2, 2), jnp.int32)}, r"lengths must be .* got \[2, 2\]"),
        ({"tables": ((1, 3, 2), jnp.int32)}, r"tables must be .* got \[1, 3, 2\]"),
        ({"sinks": ((1, 2), jnp.float32)}, r"sinks must be \[1 or batch, 0 or 4\], got \[1, 2\]"),
        ({"key_scale": ((1, 4), jnp.float32)}, r"key_scale must be \[1 or batch, 0, 1 or 2\], got \[1, 4\]"),
        ({"value_scale": ((2, 1), jnp.float32)}, "value_scale must be"),
        ({"key_strides": (33, 16, 8, 0)}, "key strides reach element 130 of pages"),
        ({"value_strides": (32, 16, -8, 0)}, "value strides reach"),
        ({"first_value": 1}, "value strides reach element 128 of pages"),
        ({"key_strides": (32, 16, 8)}, "key strides must be of page, token, head and batch"),
        ({"key_heads": 3}, "key_heads must divide the heads of query .* got 3"),
        ({"key_heads": 0}, "key_heads must divide"),
        ({"pages": -1}, "pages 0"),
        ({"page_size": 0}, "page_size must be positive"),
        ({"page_size": 2**30, "pages": 0}, "tables name 2147483648 keys"),
        ({"window": -1}, "window must be 0 ... 2\\^30, got -1"),
        ({"scale": np.inf}, "scale and soft_cap must be finite"),
        ({"soft_cap": -1.0}, "soft_cap not negative"),
        ({"stages": 1}, "stages must be 2 ... 8, got 1"),
        ({"stages": 9}, "stages must be 2 ... 8, got 9"),
        ({"tile_key_heads": 4}, "tile_key_heads must be 1, or .* 2, or with TMA 4, and divide key_heads 2, got 4"),
        ({**TMA, "tma": False}, "tile_key_heads must be 1, or .* 2, or with TMA 4, and divide key_heads 4, got 4"),
        ({"tma": True}, "TMA needs one-byte heads of 128 elements"),
        ({**TMA, "pages": 0}, "TMA needs pages whose size is a multiple of 8, got 0 of 8"),
        ({**TMA, "page_size": 4}, "TMA needs pages whose size is a multiple of 8, got 4 of 4"),
        (
            {**TMA, "key_strides": (4096, 128, 1024, 0)},
            r"token strides above head strides, .* got \[4096, 128, 1024, 0\] and .* tile_key_heads 4",
        ),
        ({**TMA, "value_strides": (4095, 512, 128, 0)}, "strides that are multiples of 16"),
        ({**TMA, "query": ((1, 3, 36, 128), jnp.bfloat16), "out": ((1, 3, 36, 128), jnp.bfloat16)}, "got 36 over 4"),
        ({"tile_key_heads": 0}, "tile_key_heads must be 1"),
        ({"tile_key_heads": 2, "key_pages": (PAGES, jnp.bfloat16), "value_pages": (PAGES, jnp.bfloat16)}, "one-byte heads"),
        ({"tile_key_heads": 2}, r"partial must be \[workers, 2, 1, 4, 64\] .* got \[5, 2, 1, 2, 64\]"),
        ({"lse": ((1, 3, 2), jnp.float32)}, r"lse must be \[batch, tokens, heads\] of query .* got \[1, 3, 2\]"),
        ({"partial": ((5, 2, 1, 2, 8), jnp.float32)}, r"partial must be \[workers, 2, 1, 2, 64\] .* got \[5, 2, 1, 2, 8\]"),
        ({"partial": ((0, 2, 1, 2, 64), jnp.float32)}, "partial must be"),
        ({"partial_stats": ((4, 2, 1, 2, 2), jnp.float32)}, "partial_stats must be"),
        ({"partial_stats": ((5, 2, 1, 2), jnp.float32)}, r"partial_stats must be .* and 2, got \[5, 2, 1, 2\]"),
        ({"splits": ((3,), jnp.int32)}, r"splits must be \[workers, 2\], got \[3\]"),
    ],
)
def test_handler_refuses(changes, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        check(**changes)


def call_of(stored="int8", new="bfloat16", *, tokens=3, requests=3, heads=4, size=8, table=2, page_size=4, **options):
    pages = jax.ShapeDtypeStruct((4, page_size, 2, size), jnp.dtype(stored))
    query = jax.ShapeDtypeStruct((tokens, heads, size), jnp.dtype(new))
    described = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((requests + 1,), (requests,), (requests, table))]
    arrays = {name: options.pop(name) for name in ("alibi_slopes", "qq_bias") if name in options}

    def bound(*given):
        found.append(OPERATION.canonicalise(*given, **arrays, **options).call)

    found = []
    jax.eval_shape(bound, query, pages, pages, *described)
    return found[0]


@needs_library
def test_supports():
    for target in (H200, A100, RTX, Target("gpu", "NVIDIA B200", "10.0")):
        assert capability.supports_forward(call_of(), target) is None
    for stored in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        assert capability.supports_forward(call_of(stored), A100) is None
    assert capability.supports_forward(call_of("bfloat16", size=256), H200) is None
    assert capability.supports_forward(call_of("int8", size=256), RTX) is None


@needs_library
@pytest.mark.parametrize(
    ("call", "target", "reason"),
    [
        (lambda: call_of("float32", "float32"), H200, "query is float32"),
        (lambda: call_of("float16"), H200, "key_pages is float16, needs bfloat16, int8"),
        (lambda: call_of(), Target("gpu", "V100", "7.0"), "needs compute capability 8.0"),
        (lambda: call_of(), Target("cpu", "cpu"), "needs an NVIDIA GPU"),
        (lambda: call_of(size=257), H200, "heads of 257 and 257 elements"),
        (lambda: call_of(tokens=13), H200, "13 new tokens of 3 requests are more than 4 each"),
        (lambda: call_of(alibi_slopes=jnp.ones(4)), H200, "alibi_slopes is not read"),
        (lambda: call_of(qq_bias=jnp.ones((2, 2))), H200, "qq_bias is not read"),
        (lambda: call_of(softmax_scale=1e35), H200, "scale 1e[+]35 is beyond"),
        (lambda: call_of(logits_soft_cap=1e-50), H200, "soft_cap 1e-50 is not within"),
        (lambda: call_of(table=2**20, page_size=2**11), H200, "tables name up to 2147483648 keys"),
        (lambda: call_of(tokens=256, requests=256, heads=256, table=2**20, page_size=256), H200, "more than 32 bits"),
        (lambda: call_of("bfloat16", size=256), RTX, "need 138 KiB of shared memory"),
    ],
)
def test_refusals(call, target, reason):
    found = capability.supports_forward(call(), target)
    assert found is not None
    assert re.search(reason, found), found


def test_configs():
    """As many blocks as fit or a few less that share tiles evenly, and rings as long as shared memory allows for them."""

    def chosen(target=H200, **options):
        found = config.FORWARD.heuristic(call_of(tokens=64, requests=64, heads=32, table=256, page_size=16, **options), target)
        return found.num_stages, found.workers

    assert chosen(stored="bfloat16", size=128) == (3, 256)  # 2 for each of 128 tiles
    assert chosen(stored="bfloat16", size=64) == (4, 384)
    assert chosen(stored="bfloat16", size=256) == (3, 128)  # 132 workers would split 128 tiles of equal length
    assert chosen(stored="int8", size=128) == (3, 256)
    assert chosen(stored="bfloat16", size=128, target=A100) == (2, 216)
    assert config.FORWARD.heuristic(call_of(tokens=1, requests=1), H200).workers == 1
    space = config.FORWARD.search_space(call_of("bfloat16", tokens=64, requests=64, table=256, size=128), H200)
    assert len(space) == len(set(space)) > 5
    assert {one.tile_key_heads for one in space} == {1}
    assert {one.workers for one in space} == {128, 132, 256, 264}
    with pytest.raises(ValueError, match=r"num_stages is 2 \.\.\. 8"):
        config.PagedAttentionConfig(9, 1)
    with pytest.raises(ValueError, match=r"tile_key_heads one of \(1, 2, 4\)"):
        config.PagedAttentionConfig(2, 1, 3)
    with pytest.raises(ValueError, match="tile_key_heads=4 needs tma=True"):
        config.PagedAttentionConfig(2, 1, 4)


def test_configs_of_key_packed_heads():
    """Two with short rows, four with TMA, if the layout allows; the search space has all."""

    def found(key_heads, stored="float8_e4m3fn", size=128, layout="pthd", target=H200):
        shape = {"phtd": (4, key_heads, 16, size), "hptd": (key_heads, 4, 16, size)}.get(layout, (4, 16, key_heads, size))
        arrays = [jax.ShapeDtypeStruct((3, 8, size), jnp.bfloat16), *[jax.ShapeDtypeStruct(shape, jnp.dtype(stored))] * 2]
        described = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4,), (3,), (3, 2))]
        calls = []
        jax.eval_shape(lambda *given: calls.append(OPERATION.canonicalise(*given, layout=layout).call), *arrays, *described)
        space, chosen = config.FORWARD.search_space(calls[0], target), config.FORWARD.heuristic(calls[0], target)
        assert chosen in space
        tried = [{one.tile_key_heads for one in space if one.tma == tma} for tma in (False, True)]
        return chosen.tile_key_heads, chosen.tma, *tried

    assert found(8) == (4, True, {1, 2}, {1, 2, 4})
    assert found(2) == (2, True, {1, 2}, {1, 2})
    assert found(1) == (1, True, {1}, {1})
    assert found(8, layout="phtd") == (1, False, {1, 2}, {1})
    assert found(8, layout="hptd") == (1, False, {1, 2}, set())
    assert found(8, size=96) == found(8, target=A100) == (2, False, {1, 2}, set())
    assert found(8, size=256) == found(8, "bfloat16") == (1, False, {1}, set())


@needs_library
@pytest.mark.parametrize("sinks", [False, True])
def test_lowers_to_one_call(sinks):
    def directly(query, key_pages, value_pages, *described):
        bound = OPERATION.canonicalise(query, key_pages, value_pages, *described, jnp.ones((4, 2)) if sinks else None)
        return kernel.forward(bound.call, bound.inputs, config.FORWARD.heuristic(bound.call, H200))

    query, pages = jax.ShapeDtypeStruct((3, 4, 8), jnp.bfloat16), jax.ShapeDtypeStruct((4, 2, 2, 8), jnp.bfloat16)
    described = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4,), (3,), (3, 2))]
    with ejkernel.use(target=H200):
        traced = jax.jit(directly).trace(query, pages, pages, *described)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@ejkernel_cuda_paged_attention_forward") == 1


@needs_library
def test_dispatched_by_name_for_a_gpu():
    """From the public function on, where a GPU is only named."""

    def decode(query, key_pages, value_pages, lengths, tables):
        return ejkernel.page_attention(query, key_pages, value_pages, lengths, tables, layout="pthd", platform="cuda")

    query, pages = jax.ShapeDtypeStruct((3, 4, 64), jnp.bfloat16), jax.ShapeDtypeStruct((4, 16, 2, 64), jnp.bfloat16)
    described = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3,), (3, 2))]
    with ejkernel.use(target=H200):
        text = jax.jit(decode).trace(query, pages, pages, *described).lower(lowering_platforms=("cuda",)).as_text()
    assert "ejkernel_cuda_paged_attention_forward" in text
    assert "stablehlo.iota" not in text  # a kernel of XLA's before ours
