"""Attention over eight devices equals attention on one: `mesh=`, Auto and Explicit meshes, specs that are left out."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ejkernel
from ejkernel.masks import MaskInfo

SPEC = P("dp", None, "tp", None)
NAMES = ("query", "key", "value", "bias", "softmax_aux")
flash_attention = functools.partial(ejkernel.flash_attention, platform="xla")


def arrays(bias_shape: tuple[int, ...] = (4, 4, 12, 12)) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shapes = ((4, 12, 4, 8), (4, 12, 2, 8), (4, 12, 2, 6), bias_shape, (4, 2))
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)


def mask_info(batch: int) -> MaskInfo:
    rng = np.random.default_rng(1)
    return MaskInfo(
        dense=rng.random((batch, 1, 12, 12)) < 0.8,
        query_segments=np.sort(rng.integers(-1, 2, (4, 12)))[:, ::-1],
        key_segments=np.sort(rng.integers(-1, 2, (4, 12)))[:, ::-1],
        key_lengths=np.array([12, 9, 12, 3]),
        causal=True,
    )


def run(info: MaskInfo, **extra):
    def loss(query, key, value, bias, sinks):
        out, lse = flash_attention(
            query,
            key,
            value,
            bias=bias,
            softmax_aux=sinks,
            mask_info=info,
            dropout_prob=0.3,
            dropout_seed=5,
            return_lse=True,
            **extra,
        )
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0)), (out, lse)

    return jax.jit(jax.value_and_grad(loss, tuple(range(5)), has_aux=True))


def assert_same(got, wanted):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-5, atol=2e-5)


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(kind, kind))


SPECS = {
    "all": (SPEC, SPEC, SPEC, P("dp", "tp"), None, None, P("tp")),
    "one short": (SPEC, SPEC, SPEC, P("dp", "tp"), None, None),
    "arrays only": (SPEC, SPEC, SPEC),
}


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
@pytest.mark.parametrize("specs", SPECS)
@pytest.mark.parametrize("batch", (4, 1))
def test_mesh_argument(kind, specs, batch):
    given = arrays()
    extra = {"mesh": mesh_of(kind), "in_specs": SPECS[specs], "out_specs": (SPEC, P("dp", None, "tp"))}
    assert_same(run(mask_info(batch), **extra)(*given), run(mask_info(batch))(*given))


@pytest.mark.parametrize("bias_shape", ((1, 4, 12, 12), (4, 1, 1, 12), (12, 12)), ids=str)
def test_a_bias_without_a_spec_follows_the_query(bias_shape):
    given = arrays(bias_shape)
    extra = {"mesh": mesh_of(AxisType.Auto), "in_specs": (SPEC,) * 3, "out_specs": (SPEC, P("dp", None, "tp"))}
    assert_same(run(mask_info(4), **extra)(*given), run(mask_info(4))(*given))


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
@pytest.mark.parametrize("spec", (SPEC, P(None, "dp"), P("tp", "dp"), P(None, None, "tp")), ids=str)
def test_sharded_inputs_under_jit(kind, spec):
    """Sequences may come split; gathering them is allowed, another result is not."""
    mesh = mesh_of(kind)
    given = arrays()
    placed = [jax.device_put(array, NamedSharding(mesh, spec)) for array in given[:3]] + [
        jax.device_put(array, NamedSharding(mesh, P())) for array in given[3:]
    ]
    wanted = run(mask_info(4))(*given)
    with jax.set_mesh(mesh):
        got = run(mask_info(4))(*placed)
    assert_same(got, wanted)
