"""Mosaic GPU kernels traced inside the manual computation of an Explicit mesh, where values read from arrays vary over it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding

import ejkernel
from ejkernel import MaskInfo

P = jax.P
CALLS = {
    "documents": {"tokens": 256},
    "documents in many blocks": {"tokens": 8192},
    "window": {"tokens": 256, "sliding_window": (100, 0)},
    "bias": {"tokens": 256, "bias": True},
    "every pair": {"tokens": 256, "documents": False, "causal": False},
}


def attention(arrays, causal=True, **options):
    info = None if arrays["segments"] is None else MaskInfo.from_segments(arrays["segments"])
    shared = {"mask_info": info, "bias": arrays["bias"], "causal": causal, **options}
    out = ejkernel.flash_attention(arrays["query"], arrays["key"], arrays["value"], **shared)
    return jnp.sum(out.astype(jnp.float32))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_attention_is_traced(name, size):
    options = dict(CALLS[name])
    tokens, with_bias, documents = options.pop("tokens"), options.pop("bias", False), options.pop("documents", True)
    mesh = jax.make_mesh((size, size), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    specs = {
        "query": ((2, tokens, 8, 64), jnp.bfloat16, P("data", None, "model", None)),
        "key": ((2, tokens, 4, 64), jnp.bfloat16, P("data", None, "model", None)),
        "value": ((2, tokens, 4, 64), jnp.bfloat16, P("data", None, "model", None)),
        "segments": ((2, tokens), jnp.int32, P("data", None)) if documents else None,
        "bias": ((2, 8, tokens, tokens), jnp.bfloat16, P("data", "model", None, None)) if with_bias else None,
    }
    arrays = {
        key: spec and jax.ShapeDtypeStruct(spec[0], spec[1], sharding=NamedSharding(mesh, spec[2]))
        for key, spec in specs.items()
    }
    with jax.set_mesh(mesh), ejkernel.use("pallas", target="gpu:9.0"):
        both = jax.grad(functools.partial(attention, **options), allow_int=True)
        program = str(jax.jit(both).trace(arrays).jaxpr)
    assert program.count("run_state") >= 3  # forward, and the two kernels of the gradients


@pytest.mark.parametrize("size", [1, 2])
def test_a_product_of_groups_is_traced(size):
    mesh = jax.make_mesh((size,), ("model",), axis_types=(AxisType.Explicit,))
    specs = {"rows": ((4096, 512), jnp.bfloat16, P()), "weights": ((4, 512, 1024), jnp.bfloat16, P(None, None, "model"))}
    rows, weights, sizes = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in (*specs.values(), ((4,), jnp.int32, P()))
    )
    with jax.set_mesh(mesh), ejkernel.use("pallas", target="gpu:9.0"):
        both = jax.grad(lambda *given: jnp.sum(ejkernel.grouped_matmul(*given).astype(jnp.float32)), (0, 1))
        program = str(jax.jit(both).trace(rows, weights, sizes).jaxpr)
    assert "wgmma" in program
