"""`rope` in CUDA C++ on a machine without a GPU: the handlers' checks, refusals, and lowering."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_calls import check_target

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.rope.interface import RopeCall
from ejkernel.plugin import Target
from ejkernel_cuda import _library
from ejkernel_cuda.rope import capability, config

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_library = pytest.mark.skipif(not _library.PATH.is_file(), reason="build the library: pip install with nvcc 13")
CALL = RopeCall(
    query=ArraySpec((2, 5, 4, 8), "bfloat16"),
    key=ArraySpec((2, 5, 2, 8), "bfloat16"),
    cos=ArraySpec((1, 5, 4), "float32"),
    sin=ArraySpec((1, 5, 4), "float32"),
    rotary_dim=8,
)


def check(
    query=((2, 5, 4, 8), jnp.float32), key=((2, 5, 2, 8), jnp.float32), cos=(1, 5, 4), sin=None, out=None, rotary_dim=8,
    span=4, threads=128, heads_first=False,
):  # fmt: skip
    return jax.block_until_ready(
        jax.ffi.ffi_call(check_target("rope_rotate"), (jax.ShapeDtypeStruct(*(out or query)), jax.ShapeDtypeStruct(*key)))(
            jnp.zeros(*query), jnp.zeros(*key), jnp.zeros(cos), jnp.zeros(sin or cos), rotary_dim=np.int64(rotary_dim),
            interleaved=False, heads_first=heads_first, inverse=False, span=np.int64(span), threads=np.int64(threads),
        )
    )  # fmt: skip


def check_gradients(d_cos=(1, 5, 8), d_sin=None, grad=(2, 5, 4, 8)):
    query, key = jnp.zeros((2, 5, 4, 8)), jnp.zeros((2, 5, 2, 8))
    return jax.block_until_ready(
        jax.ffi.ffi_call(
            check_target("rope_angle_gradients"), tuple(jax.ShapeDtypeStruct(x, jnp.float32) for x in (d_cos, d_sin or d_cos))
        )(query, key, jnp.zeros(grad), key, rotary_dim=np.int64(8), interleaved=True, heads_first=False)
    )


@needs_library
def test_handlers_admit_the_contract():
    check()
    check(query=((2, 5, 4, 8), jnp.float16), key=((2, 5, 0, 8), jnp.bfloat16), cos=(2, 5, 6), rotary_dim=6)
    check(query=((2, 4, 5, 8), jnp.float32), key=((2, 2, 5, 8), jnp.float32), heads_first=True)
    check(sin=(2, 5, 4))
    check_gradients()
    check_gradients(d_cos=(2, 5, 4))


@needs_library
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": ((2, 5, 4, 8), jnp.int32)}, "query must be float32, bfloat16 or float16"),
        ({"key": ((2, 6, 2, 8), jnp.float32)}, r"key must have batch, length and channels of query .* got \[2, 6, 2, 8\]"),
        ({"heads_first": True}, "key must have batch, length"),
        ({"rotary_dim": 7}, "rotary_dim must be even and 2 ... 8, got 7"),
        ({"rotary_dim": 10}, "rotary_dim must be even and 2 ... 8, got 10"),
        ({"cos": (3, 5, 4)}, r"cos must be .* got \[3, 5, 4\]"),
        ({"cos": (1, 5, 3)}, r"cos must be .* got \[1, 5, 3\]"),
        ({"sin": (1, 5, 8)}, "cos and sin must have the same channels"),
        ({"out": ((2, 5, 4, 8), jnp.float16)}, "query_out must be like query"),
        ({"span": 8}, "span must be 1, 2 or 4 heads, got 8"),
        ({"threads": 96}, "threads must be 64, 128 or 256, got 96"),
    ],
)
def test_rotation_refuses(arguments, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        check(**arguments)


@needs_library
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d_cos": (1, 5, 5)}, "d_cos must be"),
        ({"d_sin": (2, 5, 8)}, "d_sin must be like d_cos"),
        ({"grad": (2, 5, 2, 8)}, "query_grad must be like query"),
    ],
)
def test_gradients_refuse(arguments, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        check_gradients(**arguments)


@needs_library
def test_supports():
    def ask(target=H200, **changes):
        return capability.supports_backward(dataclasses.replace(CALL, **changes), target)

    assert ask() is None
    assert "cos is float64" in ask(cos=ArraySpec((1, 5, 4), "float64"))
    assert "head size 2147483648" in ask(query=ArraySpec((1, 1, 1, 1 << 31), "float32"))
    assert "rows of cos and sin" in ask(cos=ArraySpec((1, 1 << 31, 4), "float32"))
    assert "heads of tokens" in ask(query=ArraySpec((1 << 20, 1 << 10, 32, 8), "bfloat16"))
    assert "has 7.5" in ask(Target("gpu", "T4", "7.5"))
    assert len(config.FORWARD.search_space(CALL, H200)) == 9
    assert config.FORWARD.heuristic(CALL, H200) in config.FORWARD.search_space(CALL, H200)


@needs_library
def test_lowers_for_cuda():
    """The gradients of cos and sin are a separate call without side effects, which XLA removes if they are unused."""

    def loss(query, key, cos, sin):
        rotated = ejkernel.llama_rope(query, key, cos=cos, sin=sin, platform="cuda")
        return sum(x.astype(jnp.float32).sum() for x in rotated)

    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 16, 4, 64), (2, 16, 2, 64), (16, 32), (16, 32))]
    with ejkernel.use(target=H200):
        traced = jax.jit(jax.grad(loss, (0, 1, 2, 3))).trace(*arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert text.count("@ejkernel_cuda_rope_rotate") == 2
    assert text.count("@ejkernel_cuda_rope_angle_gradients") == 1
    assert "has_side_effect = true" not in text
    assert "ejkernel.rope[cuda]" in text
