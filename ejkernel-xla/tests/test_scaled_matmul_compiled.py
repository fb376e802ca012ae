"""`scaled_matmul` compiled for a Hopper GPU that is not there: one call of cuBLASLt, which scales its own sums."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import ejkernel

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
device_description_str: "NVIDIA H200"
runtime_version { major: 13 }
"""

pytestmark = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13))
    if importlib.util.find_spec("jax_plugins")
    else True,
    reason="needs XLA's GPU compiler: pip install jax-cuda13-pjrt",
)
CALL = re.compile(r"= \((\w+)\[\d.* custom-call\((.*?)\), custom_call_target=\"(.*?)\"")


def compiled(function: Any, *arrays: tuple[tuple[int, ...], Any]) -> str:
    device = topologies.get_topology_desc(platform="cuda", target_config=DESCRIPTION, topology="1x1x1").devices[0]
    placed = [jax.ShapeDtypeStruct(*each, sharding=SingleDeviceSharding(device)) for each in arrays]
    options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
    with ejkernel.use("xla", target="gpu:9.0"):
        return jax.jit(function).lower(*placed).compile(options).as_text() or ""


def product(lhs: Any, rhs: Any, *scales: Any, out_dtype: Any = None) -> Any:
    return ejkernel.scaled_matmul(lhs, rhs, *scales, transpose_rhs=True, precision="default", out_dtype=out_dtype)


E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
SCALES = ((4,), jnp.float32)


@pytest.mark.parametrize(("dtype", "named"), [(None, "bf16"), ("float16", "f16"), ("float32", "f32")])
def test_nothing_runs_beside_the_product(dtype: Any, named: str) -> None:
    run = lambda lhs, rhs, a, b: product(lhs, rhs, a, b, out_dtype=dtype)
    one = (), jnp.float32
    text = compiled(run, ((512, 256), E5M2), ((384, 256), E4M3), one, one)
    ((result, operands, target),) = CALL.findall(text)
    assert (result, target, operands.count("%")) == (named, "__cublas$lt$matmul$f8", 4)
    assert " fusion(" not in text and " convert(" not in text


def test_products_of_one_lhs_stay_float8_and_scales_float32() -> None:
    """XLA would merge small ones, scale what they are of, and multiply that in bfloat16."""
    run = lambda lhs, first, second, scales: (product(lhs, first, *scales[:2]), product(lhs, second, *scales[2:]))
    text = compiled(run, ((512, 256), E4M3), ((128, 256), E4M3), ((128, 256), E4M3), SCALES)
    assert [found[0::2] for found in CALL.findall(text)] == [("bf16", "__cublas$lt$matmul$f8")] * 2
    assert " convert(" not in text


def test_a_sum_of_products_is_added_within_them() -> None:
    run = lambda lhs, rhs, other, scales: product(lhs, rhs, *scales[:2]) + product(other, rhs, *scales[2:])
    text = compiled(run, ((512, 256), E5M2), ((384, 256), E4M3), ((512, 256), E5M2), SCALES)
    assert len(CALL.findall(text)) == 2 and " add(" not in text and text.count('"beta":1') == 1
