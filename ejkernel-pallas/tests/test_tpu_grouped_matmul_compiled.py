"""`grouped_matmul` compiled by the TPU compiler for chips that are not there: it refuses what does not fit or cannot be done."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from ejkernel.operations.grouped_matmul.interface import OPERATION, GroupedMatmulOutputs
from ejkernel.plugin import Target
from ejkernel_pallas.tpu.grouped_matmul import capability, config, kernel

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: pip install libtpu")
TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


@pytest.fixture(params=TOPOLOGIES)
def device(request, monkeypatch):
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return topologies.get_topology_desc(platform="tpu", topology_name=request.param).devices[0]


def problem(dtype, rows, inner, columns, groups, *, stored=None, transpose=False, offset=False, extras=False):
    """Call and shapes."""
    found = []
    held = groups // 2 if offset else groups
    shape = jax.ShapeDtypeStruct
    arrays = {
        "lhs": shape((rows, inner), dtype),
        "rhs": shape((held, columns, inner) if transpose else (held, inner, columns), stored or dtype),
        "group_sizes": shape((groups,), jnp.int32),
    }
    if offset:
        arrays["group_offset"] = shape((), jnp.int32)
    if extras:
        arrays["rhs_scale"], arrays["bias"] = shape((held, columns), dtype), shape((held, columns), dtype)
        arrays["existing_out"] = shape((rows, columns), dtype)

    def bind(arrays):
        bound = OPERATION.canonicalise(**arrays, transpose_rhs=transpose)
        found.append(bound.call)
        return bound.inputs

    return jax.eval_shape(bind, arrays), found[0]


def compiled(device, function, *shapes):
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
    kind = jax.sharding.AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=kind)):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("tpu",)).compile().as_text()


def both_phases(device, inputs, call, forward, backward):
    """Kernels in the compiled programs of forward and backward."""
    grad = OPERATION.output_specs(call).out
    text = compiled(device, lambda inputs: kernel.forward(call, inputs, forward), inputs)
    outputs = GroupedMatmulOutputs(jax.ShapeDtypeStruct(grad.shape, grad.dtype))
    other = compiled(device, lambda i, c: kernel.backward(call, i, c, c, backward), inputs, outputs)
    return text.count('custom_call_target="tpu_custom_call"'), other.count('custom_call_target="tpu_custom_call"')


@pytest.mark.parametrize(
    ("dtype", "shape", "options"),
    [
        ("bfloat16", (77, 33, 17, 3), {}),
        ("bfloat16", (520, 1000, 300, 6), {"offset": True, "extras": True}),
        ("float32", (520, 1000, 300, 6), {"transpose": True, "extras": True}),
        ("float32", (520, 1000, 384, 6), {"stored": "int8", "extras": True}),
        ("bfloat16", (520, 1000, 384, 6), {"stored": "int8"}),
        ("bfloat16", (520, 1000, 384, 6), {"stored": "float8_e4m3fn", "transpose": True, "extras": True}),
        ("float32", (520, 1000, 384, 6), {"stored": "float8_e5m2"}),
        ("bfloat16", (20, 1, 24, 3), {}),
        ("bfloat16", (20, 24, 1, 3), {"transpose": True, "extras": True}),
    ],
    ids=str,
)
def test_tiles_with_remainders_compile(device, dtype, shape, options):
    inputs, call = problem(dtype, *shape, **options)
    assert capability.supports(call, Target("tpu", device.device_kind)) is None
    forward, backward = config.Config(64, 384, 128), config.BackwardConfig(64, 384, 256, 128, 384, 128)
    stored = options.get("stored", dtype)
    sums_over_rows = stored == dtype or "extras" in options
    assert both_phases(device, inputs, call, forward, backward) == (1, 1 + sums_over_rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(4096, 4096, 14336, 8), (64, 2048, 768, 128)])
def test_the_heuristic_fits(device, dtype, shape):
    inputs, call = problem(dtype, *shape, extras=True)
    target = Target("tpu", device.device_kind)
    chosen = config.forward_heuristic(call, target), config.backward_heuristic(call, target)
    assert both_phases(device, inputs, call, *chosen) == (1, 2)
