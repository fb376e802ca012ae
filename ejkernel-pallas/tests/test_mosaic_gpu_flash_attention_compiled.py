"""`flash_attention` compiled for a Hopper GPU that is not there: products stay in flight, and registers suffice."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from ejkernel.operations.flash_attention.interface import OPERATION, FlashAttentionOutputs
from ejkernel.plugin import Target
from ejkernel_pallas.mosaic_gpu.flash_attention import config, kernel

HOPPER = Target("gpu", "NVIDIA H200", "9.0")
DESCRIPTION = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98  device_memory_size: 150000000000
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
runtime_version { major: 13 }
"""
SERIALISED = ("C7510", "C7511", "C7512", "C7513", "C7514", "C7517")
"""The assembler's remarks that matrix products run one by one, and why; the last: that it waits for some where nobody asked."""
SPILLED = 300
"""Bytes that a thread may keep outside of registers: addresses, and what only masked tiles need."""

pytestmark = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13))
    if importlib.util.find_spec("jax_plugins")
    else True,
    reason="needs XLA's GPU compiler: pip install jax-cuda13-pjrt",
)


@pytest.fixture
def device() -> Any:
    return topologies.get_topology_desc(platform="cuda", target_config=DESCRIPTION, topology="1x1x1").devices[0]


def placed(values: Any, device: Any) -> Any:
    sharding = SingleDeviceSharding(device)
    return jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding), values)


def problem(device: Any, heads: int, key_heads: int, size: int, value_size: int, **options: Any) -> tuple[Any, Any]:
    """Call and inputs of 2048 tokens on the device; `bias` is a shape and a dtype."""
    held: list[Any] = []
    bias = options.pop("bias", None)

    def bind() -> Any:
        counts, widths = (heads, key_heads, key_heads), (size, size, value_size)
        arrays = [jnp.zeros((1, 2048, count, width), jnp.bfloat16) for count, width in zip(counts, widths, strict=True)]
        given = None if bias is None else jnp.zeros(*bias)
        bound = OPERATION.canonicalise(*arrays, bias=given, causal=True, return_lse=True, **options)
        held.append(bound.call)
        return bound.inputs

    inputs = placed(jax.eval_shape(bind), device)
    return held[0], inputs


def check_report(report: str, kernels: int) -> None:
    assert not [remark for remark in SERIALISED if remark in report]
    assert report.count("Compiling entry function") == kernels
    assert max(int(number) for number in re.findall(r"(\d+) bytes spill stores", report)) <= SPILLED


@pytest.mark.parametrize(
    ("size", "value_size", "in_registers"), [(128, 128, False), (128, 128, True), (64, 64, False), (192, 128, False)]
)
def test_products_stay_in_flight(
    device: Any,
    size: int,
    value_size: int,
    in_registers: bool,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    call, inputs = problem(device, 4, 2, size, value_size)
    forward, backward = config.forward_heuristic(call, HOPPER), config.backward_heuristic(call, HOPPER)
    if in_registers:
        forward = dataclasses.replace(forward, query_in_registers=True, ping_pong=True)
        backward = dataclasses.replace(backward, query_block_k=64, key_splits=3)
        assert forward in config.forward_space(call, HOPPER)
    else:
        assert backward.key_splits > 1  # two heads of 2048 keys are few
    outputs = placed(jax.eval_shape(lambda i: kernel.forward(call, i, forward), inputs), device)
    jax.jit(lambda i: kernel.forward(call, i, forward)).lower(inputs).compile()
    cotangents = FlashAttentionOutputs(outputs.out, outputs.lse)
    jax.jit(lambda i, o, g: kernel.backward(call, i, o, g, backward)).lower(inputs, outputs, cotangents).compile()
    said = capfd.readouterr()
    check_report(said.out + said.err, 4 if backward.separate_dk_dv else 3)


@pytest.mark.parametrize(
    ("size", "value_size", "shape", "dtype"),
    [
        (128, 128, (1, 4, 2048, 2048), jnp.bfloat16),
        (128, 128, (1, 1, 2048, 2048), jnp.float32),
        (64, 64, (1, 1, 1, 2048), jnp.bfloat16),
        (192, 128, (1, 4, 2048, 1), jnp.bfloat16),
        (256, 256, (1, 4, 2048, 2048), jnp.bfloat16),
    ],
)
def test_products_beside_a_bias_stay_in_flight(
    device: Any,
    size: int,
    value_size: int,
    shape: tuple[int, ...],
    dtype: Any,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setattr(config, "MULTIPROCESSORS", 8)  # for which these few blocks of queries are enough to stay
    call, inputs = problem(device, 4, 2, size, value_size, bias=(shape, dtype))
    forward, backward = config.forward_heuristic(call, HOPPER), config.backward_heuristic(call, HOPPER)
    outputs = placed(jax.eval_shape(lambda i: kernel.forward(call, i, forward), inputs), device)
    jax.jit(lambda i: kernel.forward(call, i, forward)).lower(inputs).compile()
    cotangents = FlashAttentionOutputs(outputs.out, outputs.lse)
    jax.jit(lambda i, o, g: kernel.backward(call, i, o, g, backward)).lower(inputs, outputs, cotangents).compile()
    said = capfd.readouterr()
    check_report(said.out + said.err, 5 if backward.separate_dk_dv else 4)


def test_products_of_packed_heads_stay_in_flight(
    device: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    call, inputs = problem(device, 16, 2, 64, 64, sliding_window=(127, 0))
    packed = [chosen for chosen in config.forward_space(call, HOPPER) if chosen.pack_gqa]
    assert packed
    for chosen in packed:
        jax.jit(lambda i, chosen=chosen: kernel.forward(call, i, chosen)).lower(inputs).compile()
    said = capfd.readouterr()
    check_report(said.out + said.err, len(packed))
