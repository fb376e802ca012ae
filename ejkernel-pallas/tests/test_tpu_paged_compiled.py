"""Paged kernels compiled by the TPU compiler for chips that are not there: their VMEM, and pages that stay where they are."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel.operations.paged_attention.interface import OPERATION as ATTENTION
from ejkernel.operations.paged_cache_update.interface import OPERATION as UPDATE
from ejkernel.plugin import Target
from ejkernel_pallas import _ahead_of_time as aot
from ejkernel_pallas._call import MIN_VMEM
from ejkernel_pallas.tpu._vmem import memory_of
from ejkernel_pallas.tpu.paged_attention import capability, config, kernel
from ejkernel_pallas.tpu.paged_cache_update import (
    capability as update_capability,
    config as update_config,
    kernel as update_kernel,
)

pytestmark = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))


@functools.cache
def device(kind):
    return aot.device_of(kind)


def target_of(kind):
    return Target("tpu", device(kind).device_kind)


def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def pages_of(layout, dtype, pages, page_size, heads, size):
    shapes = {
        "pthd": (pages, page_size, heads, size),
        "phtd": (pages, heads, page_size, size),
        "hptd": (heads, pages, page_size, size),
        "interleaved": (pages, page_size, 2 * heads, size),
        "packed": (pages, page_size, heads, 2, size),
    }
    each = array(dtype, *shapes[layout])
    return {"key_pages": each} if layout in ("interleaved", "packed") else {"key_pages": each, "value_pages": each}


def described(requests, width):
    integers = functools.partial(array, jnp.int32)
    return {"query_start_loc": integers(requests + 1), "kv_lens": integers(requests), "block_tables": integers(requests, width)}


def bound(operation, arrays, options):
    calls = []

    def bind(arrays):
        found = operation.canonicalise(**arrays, **options)
        calls.append(found.call)
        return found.inputs

    return jax.eval_shape(bind, arrays), calls[0]


def attention(tokens, requests, keys, page_size, heads, key_heads, size, dtype, *, layout="pthd", stored=None, **options):
    arrays = {"query": array(dtype, tokens, heads, size), **described(requests, keys // page_size)}
    arrays |= pages_of(layout, stored or dtype, requests * keys // page_size, page_size, key_heads, size)
    if options.pop("sinks", False):
        arrays["softmax_aux"] = array(dtype, heads)
    if width := options.pop("tree", 0):
        arrays["qq_bias"] = array(dtype, width, width)
    return bound(ATTENTION, arrays, {"layout": layout, **options})


def update(tokens, requests, keys, page_size, heads, size, dtype, *, layout="pthd", stored=None, scaled=False):
    arrays = {"key": array(dtype, tokens, heads, size), "value": array(dtype, tokens, heads, size)}
    arrays |= described(requests, keys // page_size)
    arrays |= pages_of(layout, stored or dtype, requests * keys // page_size, page_size, heads, size)
    if scaled:
        arrays["k_scale"] = arrays["v_scale"] = array(jnp.float32, heads)
    return bound(UPDATE, arrays, {"layout": layout})


def measured(kind, module, call, inputs, chosen):
    found = aot.vmem_of(device(kind), aot._on(target_of(kind), module.forward, call, chosen), inputs)
    return max(found.values(), default=MIN_VMEM)


def check_vmem(kind, kernel, capability, config, inputs, call):
    """The heuristic's config takes no more than counted, and that is there."""
    target = target_of(kind)
    assert capability.supports(call, target) is None
    chosen = config.heuristic(call, target)
    found, counted = measured(kind, kernel, call, inputs, chosen), config.vmem_bytes(call, chosen)
    assert found <= counted <= memory_of(target).vmem, (chosen, found, counted)


BF16, F32 = "bfloat16", "float32"


@pytest.mark.parametrize(
    ("kind", "arguments", "options"),
    [
        ("v5e", (64, 64, 4096, 16, 32, 8, 128, BF16), {"return_lse": True}),
        ("v6e", (16, 16, 2048, 256, 8, 8, 64, F32), {"layout": "hptd"}),
        ("v6e", (2080, 33, 4096, 16, 32, 8, 128, BF16), {"sinks": True, "sliding_window": 1024}),
        ("7x", (512, 4, 1024, 64, 16, 2, 256, F32), {"layout": "packed", "logits_soft_cap": 30.0}),
        ("v5e", (512, 8, 1024, 128, 32, 4, 64, BF16), {"layout": "interleaved", "stored": "int8", "tree": 64}),
        ("7x", (96, 8, 1024, 32, 16, 16, 128, BF16), {"layout": "phtd", "stored": "float8_e4m3fn", "causal": False}),
    ],
    ids=str,
)
def test_attention_takes_no_more_vmem_than_counted(kind, arguments, options):
    inputs, call = attention(*arguments, **options)
    check_vmem(kind, kernel, capability, config, inputs, call)


@pytest.mark.parametrize(
    ("kind", "arguments", "options"),
    [
        ("v5e", (64, 64, 4096, 16, 8, 128, BF16), {}),
        ("v6e", (2080, 33, 4096, 64, 8, 128, BF16), {"stored": "int8", "scaled": True, "layout": "packed"}),
        ("7x", (512, 4, 1024, 256, 32, 256, F32), {"layout": "hptd"}),
        ("v5e", (100, 4, 1024, 32, 4, 64, BF16), {"layout": "phtd", "stored": "float8_e5m2", "scaled": True}),
    ],
    ids=str,
)
def test_update_takes_no_more_vmem_than_counted(kind, arguments, options):
    inputs, call = update(*arguments, **options)
    check_vmem(kind, update_kernel, update_capability, update_config, inputs, call)


@pytest.mark.parametrize(
    ("page_size", "size", "stored"),
    [(16, 64, "int8"), (32, 128, "float8_e4m3fn"), (64, 256, BF16), (128, 64, "float8_e5m2"), (256, 128, F32)],
)
def test_pages_and_heads_of_every_size_compile(page_size, size, stored):
    inputs, call = attention(256, 8, 1024, page_size, 8, 2, size, BF16, stored=stored, layout="interleaved")
    chosen = config.heuristic(call, target_of("v5e"))
    program = aot.compile_for(device("v5e"), aot._on(target_of("v5e"), kernel.forward, call, chosen), inputs)
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 1


@pytest.mark.parametrize(("kind", "layout"), [("v5e", "pthd"), ("v6e", "phtd"), ("7x", "hptd")])
def test_a_step_of_serving_copies_no_cache(kind, layout):
    """Donated caches and results are one; temporary memory of the program is a small part of theirs."""
    normal = functools.partial(array, jnp.bfloat16)
    cache = pages_of(layout, jnp.bfloat16, 1024, 64, 8, 128)
    arrays = (normal(40, 32, 128), normal(40, 8, 128), normal(40, 8, 128), *cache.values())
    call = jax.jit(
        functools.partial(ejkernel.chunked_prefill_paged_decode, layout=layout, platform="pallas"), donate_argnums=(3, 4)
    )
    placed = jax.sharding.SingleDeviceSharding(device(kind))
    shapes = (*arrays, *(described(16, 64)[name] for name in ("kv_lens", "block_tables", "query_start_loc")))
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=placed) for each in shapes]
    mesh = jax.sharding.AbstractMesh(
        (1,), ("device",), abstract_device=jax.sharding.AbstractDevice(device(kind).device_kind, 1, "tpu")
    )
    with ejkernel.use(target=target_of(kind)), jax.sharding.use_abstract_mesh(mesh):
        memory = call.trace(*shapes).lower(lowering_platforms=("tpu",)).compile().memory_analysis()
    caches = sum(math.prod(each.shape) * 2 for each in cache.values())
    assert memory.alias_size_in_bytes == caches
    assert memory.temp_size_in_bytes < caches // 32


def test_a_small_memory_takes_small_tiles():
    """v4 gives a kernel 16 MiB."""
    target = Target("tpu", "TPU v4")
    for size, dtype in ((128, BF16), (256, BF16), (128, F32)):
        inputs, call = attention(2080, 33, 4096, 16, 32, 8, size, dtype)
        chosen = config.heuristic(call, target)
        assert config.vmem_bytes(call, chosen) <= memory_of(target).vmem
        call = dataclasses.replace(call, save_residuals=True)
        assert measured("v5p", kernel, call, inputs, chosen) <= config.vmem_bytes(call, chosen)
