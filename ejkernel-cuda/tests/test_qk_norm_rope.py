"""`qk_norm_rope` in CUDA C++ on a machine without a GPU: the handlers' checks, refusals, and lowering."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_calls import check_target

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.qk_norm_rope.interface import QkNormRopeCall, QkNormRopeInputs
from ejkernel.plugin import Target
from ejkernel_cuda import _library
from ejkernel_cuda.qk_norm_rope import capability, config, kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_library = pytest.mark.skipif(not _library.PATH.is_file(), reason="build the library: pip install with nvcc 13")
CALL = QkNormRopeCall(
    query=ArraySpec((2, 5, 4, 8), "bfloat16"),
    key=ArraySpec((2, 5, 2, 8), "bfloat16"),
    cos=ArraySpec((1, 5, 4), "float32"),
    sin=ArraySpec((1, 5, 4), "float32"),
    query_scale=ArraySpec((1, 8), "float32"),
    rotary_dim=8,
    save_residuals=True,
)
QUERY, KEY = ((2, 5, 4, 8), jnp.float32), ((2, 5, 2, 8), jnp.float32)


def structs(*described):
    return tuple(jax.ShapeDtypeStruct(*(one if isinstance(one[0], tuple) else (one, jnp.float32))) for one in described)


def zeros(*described):
    return [jnp.zeros(one.shape, one.dtype) for one in structs(*described)]


def knobs(rotary_dim=8, heads_first=False, **others):
    numbers = {name: np.int64(value) for name, value in others.items()}
    return {"rotary_dim": np.int64(rotary_dim), "interleaved": False, "heads_first": heads_first, **numbers}


def check_forward(
    query=QUERY, key=KEY, cos=(1, 5, 4), sin=None, scales=((1, 8), (0, 8)), out=None, rstd=((40,), (20,)), span=4, threads=128,
    **others,
):  # fmt: skip
    call = jax.ffi.ffi_call(check_target("qk_norm_rope_forward"), structs(out or query, key, *rstd))
    numbers = {"epsilon": np.float32(1e-6), "scale_offset": np.float32(0)}
    arrays = zeros(query, key, cos, sin or cos, *scales)
    return jax.block_until_ready(call(*arrays, **knobs(span=span, threads=threads, **others), **numbers))


def check_backward(
    rstd=((40,), (20,)), grad=QUERY, d_x=QUERY, scales=((1, 8), (0, 8)), totals=None, partial_shapes=((1, 3, 8), (0, 3, 8)),
    partials=3, cos=(1, 5, 4), span=4,
):  # fmt: skip
    results = structs(d_x, KEY, *(totals or scales), *partial_shapes)
    arrays = zeros(QUERY, KEY, *rstd, grad, KEY, cos, cos, *scales)
    call = jax.ffi.ffi_call(check_target("qk_norm_rope_backward"), results)
    return jax.block_until_ready(call(*arrays, **knobs(span=span, partials=partials), scale_offset=np.float32(0)))


def check_angles(d_cos=(1, 5, 8), d_sin=None, rstd=((40,), (20,)), grad=QUERY, scales=((1, 8), (2, 8))):
    call = jax.ffi.ffi_call(check_target("qk_norm_rope_angle_gradients"), structs(d_cos, d_sin or d_cos))
    return jax.block_until_ready(call(*zeros(QUERY, KEY, *rstd, grad, KEY, *scales), **knobs(), scale_offset=np.float32(0)))


@needs_library
def test_handlers_admit_the_contract():
    check_forward()
    check_forward(
        query=((2, 5, 4, 8), jnp.float16), key=((2, 5, 0, 8), jnp.bfloat16), rstd=((0,), (0,)), cos=(2, 5, 6), rotary_dim=6
    )
    check_forward(query=((2, 4, 5, 8), jnp.float32), key=((2, 2, 5, 8), jnp.float32), heads_first=True, sin=(2, 5, 4))
    check_backward()
    check_backward(scales=((2, 8), (1, 8)), partial_shapes=((2, 7, 8), (1, 7, 8)), partials=7)
    check_backward(totals=(((1, 8), jnp.bfloat16), (0, 8)))
    check_angles()
    check_angles(d_cos=(2, 5, 4))


@needs_library
@pytest.mark.parametrize(
    ("check", "arguments", "message"),
    [
        (check_forward, {"query": ((2, 5, 4, 8), jnp.int32)}, "query must be float32, bfloat16 or float16"),
        (check_forward, {"key": ((2, 6, 2, 8), jnp.float32)}, r"key must have batch, length and channels .* got \[2, 6, 2, 8\]"),
        (check_forward, {"rotary_dim": 10}, "rotary_dim must be even and 2 ... 8, got 10"),
        (check_forward, {"cos": (3, 5, 4)}, r"cos must be .* got \[3, 5, 4\]"),
        (check_forward, {"sin": (1, 5, 8)}, "cos and sin must have the same channels"),
        (check_forward, {"scales": ((3, 8), (0, 8))}, r"query_scale must be \[0, 1 or batch, channels\] .* got \[3, 8\]"),
        (check_forward, {"scales": ((0, 8), (1, 7))}, r"key_scale must be .* got \[1, 7\]"),
        (check_forward, {"out": ((2, 5, 4, 8), jnp.float16)}, "query_out must be like query"),
        (check_forward, {"rstd": ((40,), (40,))}, r"key_rstd must have one value per head or none, got \[40\]"),
        (check_forward, {"span": 16}, "span must be 4 or 8 heads, got 16"),
        (check_forward, {"threads": 32}, "threads must be 64, 128 or 256, got 32"),
        (check_backward, {"span": 0}, "span must be 1 ... 2\\^20 heads, got 0"),
        (check_backward, {"rstd": ((0,), (20,))}, r"query_rstd must have one value per head, got \[0\]"),
        (check_backward, {"grad": ((2, 5, 2, 8), jnp.float32)}, "query_grad must be like query"),
        (check_backward, {"d_x": ((2, 5, 4, 8), jnp.float16)}, "d_query must be like query"),
        (check_backward, {"totals": ((2, 8), (0, 8))}, "the gradient of query_scale must be like it"),
        (check_backward, {"totals": (((1, 8), jnp.int32), (0, 8))}, "the gradient of query_scale must be float32, bfloat16 or"),
        (check_backward, {"partial_shapes": ((1, 2, 8), (0, 3, 8))}, r"partial sums of query_scale must be \[1, 3 partials, 8\]"),
        (check_backward, {"partials": 0, "partial_shapes": ((1, 0, 8), (0, 0, 8))}, "partials must be positive, got 0"),
        (check_angles, {"d_cos": (1, 5, 5)}, "d_cos must be"),
        (check_angles, {"d_sin": (2, 5, 8)}, "d_sin must be like d_cos"),
        (check_angles, {"rstd": ((40,), (0,))}, "key_rstd must have one value per head, got"),
    ],
)  # fmt: skip
def test_refused(check, arguments, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"ejkernel_cuda qk_norm_rope: {message}"):
        check(**arguments)


@needs_library
def test_wide_and_odd_heads_are_refused():
    for width, rotary_dim in ((258, 8), (7, 6)):
        shapes = [((1, 5, 2, width), jnp.float32)] * 2
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"head size must be even and at most 256, got {width}"):
            check_forward(*shapes, (1, 5, rotary_dim), scales=((0, width),) * 2, rstd=((10,),) * 2, rotary_dim=rotary_dim)


@needs_library
def test_supports():
    def ask(target=H200, **changes):
        return capability.supports_backward(dataclasses.replace(CALL, **changes), target)

    assert ask() is None
    assert "query_scale is float64" in ask(query_scale=ArraySpec((1, 8), "float64"))
    assert "head size 258 is not even and at most 256" in ask(query=ArraySpec((1, 1, 1, 258), "float32"))
    assert "head size 7" in ask(query=ArraySpec((1, 1, 1, 7), "float32"))
    assert "rotary_dim is 0" in ask(rotary_dim=0)
    assert "rows of cos and sin" in ask(cos=ArraySpec((1, 1 << 31, 4), "float32"))
    assert "heads of tokens" in ask(query=ArraySpec((1 << 20, 1 << 10, 32, 8), "bfloat16"))
    assert "batch members" in ask(key_scale=ArraySpec((1 << 28, 8), "float32"))
    assert "has 7.5" in ask(Target("gpu", "T4", "7.5"))
    for space in (config.FORWARD, config.BACKWARD):
        assert space.heuristic(CALL, H200) in space.search_space(CALL, H200)


@needs_library
def test_lowers_for_cuda():
    """The gradients of cos and sin are a separate call without side effects, which XLA removes if they are unused."""

    def loss(*arrays):
        return sum(x.astype(jnp.float32).sum() for x in ejkernel.fused_qk_norm_rope(*arrays, platform="cuda"))

    shapes = ((2, 16, 4, 64), (2, 16, 2, 64), (16, 32), (16, 32), (64,), (64,))
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with ejkernel.use(target=H200):
        traced = jax.jit(jax.grad(loss, tuple(range(6)))).trace(*arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    for name in ("forward", "backward", "angle_gradients"):
        assert text.count(f"@ejkernel_cuda_qk_norm_rope_{name}") == 1
    assert "has_side_effect = true" not in text
    assert "ejkernel.qk_norm_rope[cuda]" in text


def test_no_tokens():
    arrays = [jnp.zeros(shape) for shape in ((2, 0, 4, 8), (2, 0, 2, 8), (1, 0, 4), (1, 0, 4), (1, 8))]
    inputs = QkNormRopeInputs(*arrays)
    outputs = kernel.forward(CALL, inputs, config.ForwardConfig(4))
    assert outputs.query_rstd.shape == (2, 0, 4) and outputs.key.shape == (2, 0, 2, 8)
    gradients = kernel.backward(CALL, inputs, outputs, outputs, config.BackwardConfig(4))
    np.testing.assert_array_equal(gradients.query_scale, np.zeros((1, 8)))
    assert gradients.key_scale is None
