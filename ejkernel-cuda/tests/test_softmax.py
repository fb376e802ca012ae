"""`softmax` in CUDA C++ on a machine without a GPU: the handlers' checks, masks as they are stored, and lowering."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_calls import check_target

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.operations.softmax.interface import SoftmaxCall
from ejkernel.plugin import Target
from ejkernel_cuda import _library
from ejkernel_cuda.softmax import capability, config
from ejkernel_cuda.softmax.mask import axes_of

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_library = pytest.mark.skipif(not _library.PATH.is_file(), reason="build the library: pip install with nvcc 13")


def check(
    phase="forward",
    x=((6, 8), jnp.float32),
    where=(0, 1),
    sizes=(),
    strides=(),
    out=None,
    grad=None,
    threads=32,
    cluster=1,
    stages=3,
):
    arrays = [jnp.zeros(*x)] + ([jnp.zeros(*(grad or x))] if phase == "backward" else [])
    return jax.block_until_ready(
        jax.ffi.ffi_call(check_target(f"softmax_{phase}"), jax.ShapeDtypeStruct(*(out or x)))(
            *arrays, jnp.zeros(where, bool), scale=np.float32(1), sizes=np.array(sizes, np.int64),
            strides=np.array(strides, np.int64), threads=np.int64(threads), cluster=np.int64(cluster),
            stages=np.int64(stages),
        )
    )  # fmt: skip


@needs_library
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_handlers_admit_the_contract(phase):
    check(phase)
    check(phase, where=(6, 8), sizes=(6,), strides=(1,))
    check(phase, where=(3, 1), sizes=(2, 3), strides=(0, 1), cluster=8)
    check(phase, x=((6, 8), jnp.float16), where=(2, 8), sizes=(2, 3), strides=(1, 0))


@needs_library
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": ((6, 8), jnp.int32)}, "x must be float32, bfloat16 or float16"),
        ({"x": ((2, 3, 8), jnp.float32)}, r"x must be \[rows, width\], got \[2, 3, 8\]"),
        ({"where": (6, 4), "sizes": (6,), "strides": (1,)}, r"where must be .* got \[6, 4\]"),
        ({"where": (6, 8)}, "sizes must not be empty with where"),
        ({"where": (6, 8), "sizes": (5,), "strides": (1,)}, "sizes make 5 rows, x has 6"),
        ({"where": (6, 8), "sizes": (6,), "strides": (2,)}, "strides reach row 10 of where"),
        ({"where": (6, 8), "sizes": (6,), "strides": (-1,)}, "strides not negative"),
        ({"where": (6, 8), "sizes": (6, 1), "strides": (1,)}, "up to 8 numbers each, got 2 and 1"),
        ({"where": (6, 8), "sizes": (1,) * 9, "strides": (0,) * 9}, "up to 8 numbers each"),
        ({"out": ((6, 9), jnp.float32)}, "must be like"),
        ({"threads": 0}, "threads must be a power of two"),
        ({"cluster": 5}, "cluster must be a power of two"),
        ({"stages": 16}, "stages must be 0 ... 8, got 16"),
    ],
)
def test_handlers_refuse(phase, arguments, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        check(phase, **arguments)


@needs_library
def test_backward_refuses_another_gradient():
    with pytest.raises(jax.errors.JaxRuntimeError, match="grad must be like out"):
        check("backward", grad=((6, 4), jnp.float32))


@pytest.mark.parametrize(
    ("x", "where", "sizes", "strides"),
    [
        ((4, 5, 6, 7), (4, 5, 6, 7), (120,), (1,)),
        ((4, 5, 6, 7), (1, 1, 1, 7), (120,), (0,)),
        ((4, 5, 6, 7), (4, 1, 6, 7), (4, 5, 6), (6, 0, 1)),
        ((4, 5, 6, 7), (1, 5, 1, 1), (4, 5, 6), (0, 1, 0)),
        ((4, 1, 6, 7), (4, 1, 6, 1), (24,), (1,)),
        ((1, 7), (1, 7), (1,), (0,)),
    ],
)
def test_masks_are_read_as_they_are_stored(x, where, sizes, strides):
    axes = axes_of(ArraySpec(x, "float32"), ArraySpec(where, "bool"))
    assert (axes.sizes, axes.strides) == (sizes, strides)
    rows = np.arange(np.prod(where[:-1])).reshape(where[:-1])
    index = np.indices(axes.sizes).reshape(len(axes.sizes), -1)
    np.testing.assert_array_equal(np.array(axes.strides) @ index, np.broadcast_to(rows, x[:-1]).reshape(-1))


@needs_library
def test_supports():
    def ask(x=(4, 8), dtype="float32", where=None, target=H200):
        spec = None if where is None else ArraySpec(where, "bool")
        return capability.supports_forward(SoftmaxCall(x=ArraySpec(x, dtype), where=spec), target)

    assert ask() is None and ask(where=(4, 1)) is None
    assert "x is float64" in ask(dtype="float64")
    assert "width 2147483648" in ask(x=(1, 1 << 31))
    assert "the target is tpu" in ask(target=Target("tpu", "TPU v5e"))
    shape = (2,) * 9 + (4,)
    assert "where has 9 alternating stored and broadcast axes, needs 8" in ask(x=shape, where=(2, 1) * 4 + (2, 4))


def test_configs_are_few():
    for width in (1, 100, 4096, 131072):
        call = SoftmaxCall(x=ArraySpec((4, width), "bfloat16"))
        space = config.FORWARD.search_space(call, H200)
        assert 1 <= len(space) <= 40 and config.FORWARD.heuristic(call, H200).threads <= 512


@needs_library
def test_lowers_for_cuda():
    def loss(x, where):
        return ejkernel.softmax(x, where=where, platform="cuda").astype(jnp.float32).sum()

    arguments = jax.ShapeDtypeStruct((4, 8, 256), jnp.bfloat16), jax.ShapeDtypeStruct((8, 1), bool)
    with ejkernel.use(target=H200):
        text = jax.jit(jax.grad(loss)).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert text.count("@ejkernel_cuda_softmax_forward") == text.count("@ejkernel_cuda_softmax_backward") == 1
    assert "ejkernel.softmax[cuda]" in text
