"""`quantize_float8` in Triton on a machine without a GPU: numbers are the conformance suite's; here, tiles and machine code."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.operations.quantize_float8.cases import CASES
from ejkernel.operations.quantize_float8.interface import OPERATION
from ejkernel.plugin import Target
from ejkernel_triton.quantize_float8 import capability, config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton._ahead_of_time import recorded, target_of
from ejkernel_triton.quantize_float8 import kernel

NAMED = {case.name: case for case in CASES}


@pytest.mark.parametrize("choice", [config.SMALLEST, config.Config(16, 64, 4), config.Config(128, 32, 4)], ids=str)
@pytest.mark.parametrize("scales", [1, 3])
def test_tiles_and_members_of_a_batch(monkeypatch, scales, choice):
    monkeypatch.setattr(kernel, "call_kernel", testing.interpreted_call)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 70, 41)), jnp.bfloat16)
    x *= jnp.arange(1, 4, dtype=x.dtype)[:, None, None]
    bound = OPERATION.canonicalise(x[0], jnp.float32(0.01), transposed=True)
    inputs = bound.inputs._replace(x=x, scale=jnp.asarray([0.01, 0.02, 0.003][:scales], jnp.float32))
    call = dataclasses.replace(bound.call, x=dataclasses.replace(bound.call.x, shape=x.shape))
    values, largest, transposed = kernel.forward(call, inputs, choice)
    scaled = np.asarray(x, np.float32) * (1 / np.asarray(inputs.scale))[:, None, None]
    wanted = np.clip(scaled, -448, 448).astype(jnp.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(values).view(np.uint8), wanted.view(np.uint8))
    np.testing.assert_array_equal(np.asarray(transposed).view(np.uint8), wanted.swapaxes(1, 2).view(np.uint8))
    np.testing.assert_array_equal(largest, np.abs(np.asarray(x, np.float32)).max((1, 2)))


@pytest.mark.parametrize("name", ["bench-8192x2048", "bench-8192x5504-e5m2", "bench-8192x5504-as-it-lies"])
def test_every_config_reads_and_writes_16_bytes_and_spills_nothing(monkeypatch, tmp_path, name):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = [launch for _, launch in recorded("quantize_float8", NAMED[name], "bfloat16", target_of(90), space=True)]
    assert len(launches) >= 4
    for launch in launches:
        compiled = launch.compile(90)
        assert testing.stack_bytes(compiled) <= testing.tolerated_stack(), launch.constants
        for wide in ("ld.global.v4.b32", "st.global.v4.b32"):
            assert wide in compiled.asm["ptx"], launch.constants


def test_what_is_refused():
    call = OPERATION.canonicalise(jnp.zeros((4, 4)), jnp.float32(1)).call
    assert capability.supports_forward(call, Target("gpu", "NVIDIA A100", "8.0")).startswith(
        "Triton has no float8_e4m3fn below"
    )
    huge = dataclasses.replace(call, x=dataclasses.replace(call.x, shape=(1, 2**31, 2**12)))
    assert "tiles" in capability.supports_forward(huge, Target("gpu", "NVIDIA H200", "9.0"))
