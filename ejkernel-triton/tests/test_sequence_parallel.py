"""A sequence that is split over devices: which kernels remain of the runs that pass states."""

from __future__ import annotations

import collections
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import ejkernel
from ejkernel_triton._jax_triton import intercept_launches

TOKENS, HEADS, WIDTH = 4096, 32, 128


def launch_by_name(kernel, inputs, outputs, **options):
    """A custom call of the kernel's name, which is lowered without compiling it."""
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs]
    return jax.ffi.ffi_call(kernel.fn.__name__, results)(*(x for x in inputs if not isinstance(x, int)))


def launches(function: str, arrays: dict, gradients: bool, devices: int = 2) -> dict[str, int]:
    """How often each kernel is in the program that JAX hands to XLA."""
    mesh = jax.make_mesh((devices,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
    call = ejkernel.sequence_parallel(getattr(ejkernel, function), "sp")
    split = P(None, "sp")
    run = jax.shard_map(lambda arrays: call(**arrays), mesh=mesh, in_specs=split, out_specs=split)

    def loss(arrays):
        return jnp.sum(jnp.sin(run(arrays).astype(jnp.float32)))

    traced = jax.value_and_grad(loss) if gradients else run
    with ejkernel.use("triton", target="gpu:9.0"), intercept_launches(launch_by_name):
        text = jax.jit(traced).trace(arrays).lower(lowering_platforms=("cuda",)).as_text("hlo")
    return collections.Counter(re.findall(r'custom_call_target="(\w+_kernel)"', text))


def of(*sizes: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, TOKENS, HEADS, *sizes), dtype)


ATTENTION = dict.fromkeys(("query", "key", "value"), of(WIDTH))
RECURRENCES = {
    "gla_attention": (
        ATTENTION | {"g": of(WIDTH)},
        {"fused_chunk_kernel": 1, "recurrent_kernel": 1},
        {"fused_chunk_kernel": 4},
    ),
    "gated_delta_rule": (
        ATTENTION | {"beta": of(), "decay": of(dtype=jnp.float32)},
        {"state_scan_kernel": 2, "recurrent_kernel": 1},
        {"state_scan_backward_kernel": 2, "gradient_kernel": 1},
    ),
}


@pytest.mark.parametrize("name", RECURRENCES)
def test_outputs_and_gradients_are_made_once(name):
    """The runs that only find states leave those of states."""
    arrays, forward, backward = RECURRENCES[name]
    found = launches(name, arrays, False)
    assert {kernel: found[kernel] for kernel in forward} == forward
    found = launches(name, arrays, True)
    wanted = forward | backward
    if name == "gated_delta_rule":
        wanted = wanted | {"state_scan_kernel": 3}
    assert {kernel: found[kernel] for kernel in wanted} == wanted


def test_transitions_of_more_devices():
    """Matrices take another walk, of as many columns as keys have channels."""
    arrays, forward, _ = RECURRENCES["gated_delta_rule"]
    assert launches("gated_delta_rule", arrays, False, 4)["state_scan_kernel"] == forward["state_scan_kernel"] + 1
