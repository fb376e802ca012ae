"""`EJKERNEL_TRITON_INTERPRET=1`: the kernels on the host, under jit and grad, without a GPU and without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel_triton._interpret import INTERPRET

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")

import triton
import triton.language as tl

from ejkernel_triton import testing
from ejkernel_triton._jax_triton import call_kernel

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
import ejkernel

x = jnp.asarray(np.random.default_rng(0).standard_normal((6, 40)), jnp.float32)
scale = jnp.linspace(0.5, 2, 40)
answer = {}
try:
    def loss(platform):
        return jax.jit(jax.value_and_grad(lambda x: (ejkernel.rms_norm(x, scale, platform=platform) ** 3).sum()))
    (value, gradient), (wanted, wanted_gradient) = loss("triton")(x), loss("xla")(x)
    answer["value"] = abs(float(value / wanted) - 1)
    answer["gradient"] = float(jnp.abs(gradient - wanted_gradient).max() / jnp.abs(wanted_gradient).max())
except ejkernel.NoKernelError as error:
    answer["error"] = str(error)
answer["default"] = ejkernel.explain("rms_norm", x, scale).forward.chosen.platform
answer["imported"] = [name for name in ("jax_triton", "torch") if name in sys.modules]
print(json.dumps(answer))
"""


def run(**environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EJKERNEL_")}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env={**clean, "JAX_PLATFORMS": "cpu", **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_run_on_the_host_where_it_is_asked_for():
    answer = run(**{INTERPRET: "1"})
    assert answer["value"] < 1e-5 and answer["gradient"] < 1e-5
    assert (answer["default"], answer["imported"]) == ("xla", [])


def test_the_host_is_refused_otherwise():
    answer = run()
    assert "runs on gpu, the target is cpu" in answer["error"]
    assert answer["default"] == "xla"


@triton.jit
def adding_kernel(p_x, count, p_sum, p_out, BLOCK: tl.constexpr):
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o_x, mask=o_x < count)
    tl.store(p_out + o_x, b_x + tl.load(p_sum + o_x, mask=o_x < count), mask=o_x < count)


@triton.jit
def wild_kernel(p_x, count, p_out, BLOCK: tl.constexpr):
    tl.store(p_out + tl.arange(0, BLOCK), tl.load(p_x + tl.arange(0, BLOCK)))


def test_a_kernel_under_transformations(monkeypatch):
    monkeypatch.setenv(INTERPRET, "1")
    x, total = jnp.arange(20.0), jnp.full(20, 0.5)

    def add(x, total):
        inputs = (x, x.size, total)
        return call_kernel(adding_kernel, inputs, ((x.shape, x.dtype),), grid=3, num_warps=4, fp_fusion=False, BLOCK=8)[0]

    np.testing.assert_array_equal(jax.jit(add)(x, total), x + total)
    repeated = jax.lax.scan(lambda carry, _: (add(x, carry), None), total, None, length=3)[0]
    np.testing.assert_array_equal(repeated, 3 * x + total)


def test_results_in_the_memory_of_an_input(monkeypatch):
    monkeypatch.setenv(INTERPRET, "1")
    x, total = jnp.arange(20.0), jnp.full(20, 0.5)

    def add_some(x, total):
        aliases = {2: 0}
        inputs = (x, 8, total)
        return call_kernel(
            adding_kernel, inputs, ((x.shape, x.dtype),), grid=3, num_warps=4, input_output_aliases=aliases, BLOCK=8
        )[0]

    wanted = np.where(np.arange(20) < 8, x + total, total)
    np.testing.assert_array_equal(jax.jit(add_some)(x, total), wanted)
    np.testing.assert_array_equal(total, np.full(20, 0.5))


def test_writing_outside_of_an_output_is_found():
    from ejkernel_triton.testing import interpreted_call

    x = jnp.arange(16.0)
    with pytest.raises(AssertionError, match="written outside"):
        interpreted_call(wild_kernel, (x, 16), (((8,), x.dtype),), grid=1, num_warps=4, BLOCK=16)


def test_unset_it_is_a_launch(monkeypatch):
    monkeypatch.setenv(INTERPRET, "0")
    with ejkernel.use(target="cpu"), pytest.raises(ValueError, match="expected a GPU with a known compute capability"):
        call_kernel(adding_kernel, (jnp.zeros(8), 8, jnp.zeros(8)), (((8,), jnp.float32),), grid=1, num_warps=4, BLOCK=8)


@triton.jit
def product_kernel(p_left, p_right, p_out, PRECISION: tl.constexpr):
    o_tile = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    b_out = tl.dot(tl.load(p_left + o_tile), tl.load(p_right + o_tile), input_precision=PRECISION)
    tl.store(p_out + o_tile, b_out)


@pytest.mark.parametrize(("precision", "least", "most"), [("ieee", 0, 2e-7), ("tf32x3", 1e-7, 6e-7), ("tf32", 1e-4, 6e-4)])
def test_products_of_float32_are_as_exact_as_on_a_gpu(monkeypatch, precision, least, most):
    monkeypatch.setenv(INTERPRET, "1")
    left, right = np.random.default_rng(0).standard_normal((2, 16, 16)).astype(np.float32)
    outputs = ((left.shape, jnp.float32),)
    out = call_kernel(product_kernel, (left, right), outputs, grid=1, num_warps=4, PRECISION=precision)[0]
    exact = left.astype(np.float64) @ right.astype(np.float64)
    assert least <= np.linalg.norm(out - exact) / np.linalg.norm(exact) < most
    infinite = np.where(left > 1.5, np.inf, left)
    out = call_kernel(product_kernel, (infinite, np.abs(right)), outputs, grid=1, num_warps=4, PRECISION=precision)[0]
    np.testing.assert_array_equal(np.isposinf(out), np.isposinf(infinite @ np.abs(right)))


@triton.jit
def _to_float8_kernel(p_x, p_out, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(p_out + offsets, tl.load(p_x + offsets).to(p_out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_float8_is_rounded_to_nearest_even_and_saturated(dtype):
    """As a GPU does; Triton's own interpreter makes 125 to 128 into 64, and NaN a number."""
    x = np.array(
        [1.0625, 1.1875, 126.5, 1e-3, 2.0**-10, -0.0, np.inf, -1e9, np.nan, 3e-6] + [0.1 * i for i in range(22)], np.float32
    )
    (got,) = testing.interpreted_call(_to_float8_kernel, (x,), (((32,), dtype),), grid=1, num_warps=1, SIZE=32)
    most = float(jnp.finfo(dtype).max)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.clip(x, -most, most).astype(dtype).view(np.uint8))
