"""How programs launch Triton kernels."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel_triton import _jax_triton
from ejkernel_triton._versions import version_problem

pytestmark = pytest.mark.skipif(version_problem() is not None, reason=f"install jax-triton: {version_problem()}")


@pytest.fixture(scope="module")
def text():
    def normed(x, scale):
        return ejkernel.rms_norm(x[3:], scale, platform="triton")[1:]

    x, scale = jax.ShapeDtypeStruct((16, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256,), jnp.float32)
    with ejkernel.use(target="gpu:9.0"):
        return jax.jit(normed).trace(x, scale).lower(lowering_platforms=("cuda",)).as_text()


def test_a_launch_may_stand_in_a_cuda_graph(text):
    if _jax_triton.call_name() == "triton_kernel_call":
        pytest.skip("this jaxlib has no typed call of Triton kernels")
    assert len(re.findall(r"custom_call @triton_kernel_call_ffi.*api_version = 4 : i32.*opaque = ", text)) == 1


def test_no_slice_touches_a_launch(text):
    """XLA would join it: the kernel got a pointer of any alignment."""
    if _jax_triton.call_name() == "triton_kernel_call":
        pytest.skip("this jaxlib has no typed call of Triton kernels")
    result, operands = re.findall(r"(%\w+)(?::\d+)? = stablehlo.custom_call @triton_kernel_call_ffi\(([^)]*)\)", text)[0]
    before, after = re.findall(r"(%\w+)(?::\d+)? = stablehlo.optimization_barrier ([^:]*) :", text)
    assert {each.strip().split("#")[0] for each in operands.split(",")} == {before[0]}
    assert {each.strip().split("#")[0] for each in after[1].split(",")} == {result}
