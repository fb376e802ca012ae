"""Ring attention whose steps are the TPU kernels, over four devices, against the float64 reference.

In Pallas's plain interpreter: the one that simulates a TPU wants all devices to run the same
kernels in the same order, and here some have nothing to do while others work.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ejkernel
from ejkernel.errors import NoKernelError
from ejkernel.masks import MaskInfo
from ejkernel.operations.flash_attention import reference
from ejkernel.operations.flash_attention.interface import OPERATION, FlashAttentionOutputs
from ejkernel.plugin import Target
from ejkernel.testing.problem import as_reference

DEVICES = 4
T = 64
V6E = Target("tpu", "TPU v6 lite")
SPLIT = P(None, "sp")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    if len(jax.devices()) < DEVICES:
        pytest.skip(f"needs {DEVICES} devices, this machine has {len(jax.devices())}")
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    with ejkernel.use(target=V6E):
        yield


def normal(shape, seed):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def segments():
    """Three packed sequences, one of which lies over three devices, and padding."""
    return np.stack([np.repeat([0, 1, 2, -1], lengths) for lengths in ((10, 40, 8, 6), (30, 2, 32, 0))]).astype(np.int32)


CASES = {
    "full": {},
    "causal, zigzag": {"causal": True, "layout": "zigzag"},
    "window, sinks": {"causal": True, "sliding_window": (20, 0), "sinks": normal((4,), 9)},
    "packed": {"causal": True, "segments": segments()},
    "packed, zigzag, soft cap": {"causal": True, "segments": segments(), "layout": "zigzag", "logits_soft_cap": 2.0},
}


def expected(arrays, segments, cotangents, sinks=None, layout=None, **options):
    """Outputs and gradients of the whole sequence, in float64; a row that sees nothing has no gradient of its log-sum-exp."""
    mask_info = None if segments is None else MaskInfo.from_segments(segments)
    bound = OPERATION.canonicalise(*arrays, softmax_aux=sinks, mask_info=mask_info, return_lse=True, **options)
    inputs = as_reference(bound.inputs)
    outputs = reference.forward(bound.call, inputs)
    cotangents = FlashAttentionOutputs(cotangents[0], np.where(np.isfinite(outputs.lse), cotangents[1], 0.0))
    gradients = reference.backward(bound.call, inputs, outputs, cotangents)
    return (outputs.out, outputs.lse), (gradients.query, gradients.key, gradients.value), cotangents


def ring(segments, sinks=None, **options):
    """A function of whole arrays. The interpreter cannot compare lists made on device, which vary over a mesh, with places in
    a grid, so that nothing is checked to vary where there are segments."""
    mesh = jax.make_mesh((DEVICES,), ("sp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    given = {"segments": segments} if segments is not None else {}

    def local(query, key, value, given):
        info = {name: MaskInfo.from_segments(value) for name, value in given.items()}
        return ejkernel.ring_attention(
            query,
            key,
            value,
            softmax_aux=sinks,
            mask_info=info.get("segments"),
            axis_name="sp",
            return_lse=True,
            platform="pallas",
            **options,
        )

    mapped = jax.shard_map(local, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=segments is None)
    return jax.jit(lambda *arrays: mapped(*arrays, given))


@pytest.mark.parametrize("name", CASES)
def test_ring(name):
    options = dict(CASES[name])
    segments = options.pop("segments", None)
    arrays = normal((2, T, 4, 16), 1), normal((2, T, 2, 16), 2), normal((2, T, 2, 8), 3)
    outputs, gradients, cotangents = expected(arrays, segments, (normal((2, T, 4, 8), 4), normal((2, T, 4), 5)), **options)
    order = restored = jnp.asarray
    if options.get("layout") == "zigzag":
        order = functools.partial(ejkernel.zigzag_shard, axis_size=DEVICES)
        restored = functools.partial(ejkernel.zigzag_unshard, axis_size=DEVICES)
    run = ring(None if segments is None else order(jnp.asarray(segments)), **options)
    found, pullback = jax.vjp(run, *(order(jnp.asarray(array)) for array in arrays))
    moved = tuple(order(jnp.asarray(value, jnp.float32)) for value in cotangents)
    for got, wanted in zip(found, outputs, strict=True):
        np.testing.assert_allclose(restored(got), wanted, rtol=2e-5, atol=2e-5)
    for got, wanted in zip(pullback(moved), gradients, strict=True):
        np.testing.assert_allclose(restored(got), wanted, rtol=1e-4, atol=2e-5)


def test_the_steps_are_the_kernels():
    """In the program that users get, lowered for TPU: forward, and both kernels of backward."""
    run = ring(None, causal=True)
    shapes = [jax.ShapeDtypeStruct((2, 1024, heads, 128), jnp.bfloat16) for heads in (4, 2, 2)]

    def loss(*arrays):
        return sum(jnp.sum(value.astype(jnp.float32)) for value in run(*arrays))

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*shapes))
    for name in ("", "_backward_key", "_backward_query"):
        assert f"name=ejkernel_flash_attention{name}\n" in text


def test_an_auto_mesh_is_refused_with_the_remedy():
    """The TPU's compiler cannot split a kernel: the call names the way out, and another platform may take over."""
    mesh = jax.make_mesh((DEVICES,), ("sp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    x = jax.device_put(jnp.asarray(normal((8, 128), 1)), NamedSharding(mesh, P("sp")))
    with pytest.raises(NoKernelError, match=r"Auto axes.*shard_map"):
        jax.jit(lambda x: ejkernel.rms_norm(x, platform="pallas"))(x)
    found = jax.jit(lambda x: ejkernel.rms_norm(x, platform=("pallas", "xla")))(x)
    np.testing.assert_allclose(found, ejkernel.rms_norm(x, platform="xla"), rtol=1e-6)
