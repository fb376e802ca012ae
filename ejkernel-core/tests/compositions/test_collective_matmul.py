"""Products overlapped with their collective equal the product and the collective, forward and backward."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import ejkernel

ROWS = P("tp", None)
HIGHEST = jax.lax.Precision.HIGHEST


def normal(*shape: int, seed: int = 0, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def mesh_of(devices: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    if len(jax.devices()) < devices:
        pytest.skip(f"needs {devices} devices, this machine has {len(jax.devices())}")
    return jax.make_mesh((devices,), ("tp",), axis_types=(kind,), devices=jax.devices()[:devices])


def gather_then_multiply(x, y, axis_name, rhs_transpose=False):
    return jnp.matmul(
        jax.lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True), y.T if rhs_transpose else y, precision=HIGHEST
    )


def multiply_then_scatter(x, y, axis_name, rhs_transpose=True):
    whole = jnp.matmul(x, y.T if rhs_transpose else y, precision=HIGHEST)
    return jax.lax.psum_scatter(whole, axis_name, scatter_dimension=x.ndim - 2, tiled=True)


GATHER = (ejkernel.all_gather_matmul, gather_then_multiply)
SCATTER = (ejkernel.reduce_scatter_matmul, multiply_then_scatter)
CASES = {
    "gather": (GATHER, (16, 6), (6, 24), False, (ROWS, P(None, "tp")), P(None, "tp")),
    "gather, transposed": (GATHER, (16, 6), (24, 6), True, (ROWS, ROWS), P(None, "tp")),
    "gather, batched": (GATHER, (2, 16, 6), (6, 24), False, (P(None, "tp"), P(None, "tp")), P(None, None, "tp")),
    "gather, whole matrix": (GATHER, (16, 6), (6, 5), False, (ROWS, P()), P(None, "tp")),
    "scatter": (SCATTER, (16, 24), (5, 24), True, (P(None, "tp"), P(None, "tp")), ROWS),
    "scatter, not transposed": (SCATTER, (16, 24), (24, 5), False, (P(None, "tp"), ROWS), ROWS),
    "scatter, batched": (SCATTER, (2, 16, 24), (5, 24), True, (P(None, None, "tp"), P(None, "tp")), P(None, "tp")),
}


def pulled(function, x, y, **sharded):
    """The result and both gradients."""
    function = function if not sharded else jax.shard_map(function, **sharded)

    def loss(x, y):
        out = function(x, y)
        return jnp.sum(out * normal(*out.shape, seed=3)).astype(jnp.float32), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, y)
    return out, *gradients


def on_two_devices():
    sharded = {"mesh": mesh_of(2), "in_specs": (ROWS, P(None, "tp")), "out_specs": P(None, "tp")}
    return functools.partial(ejkernel.all_gather_matmul, axis_name="tp", **sharded)


def assert_same(got, wanted, tolerance: float = 1e-5):
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("devices", (2, 4, 8))
@pytest.mark.parametrize("name", CASES)
def test_equals_product_and_collective(name, devices):
    (ours, theirs), x, y, transposed, in_specs, out_specs = CASES[name]
    x, y, mesh = normal(*x), normal(*y, seed=1), mesh_of(devices)
    options = {"axis_name": "tp", "rhs_transpose": transposed}
    sharded = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    wanted = pulled(functools.partial(theirs, **options), x, y, **sharded)
    assert_same(pulled(functools.partial(ours, **options), x, y, **sharded), wanted)
    assert_same(pulled(functools.partial(ours, **options, **sharded), x, y), wanted)


@pytest.mark.parametrize("name", ("gather", "scatter"))
def test_explicit_mesh_and_class_form(name):
    (ours, _), x, y, _, in_specs, out_specs = CASES[name]
    form = {"gather": ejkernel.AllGatherMatmul, "scatter": ejkernel.ReduceScatterMatmul}[name]()
    x, y = normal(*x), normal(*y, seed=1)
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    wanted = ours(x, y, "tp", mesh=mesh_of(4), **specs)
    np.testing.assert_array_equal(form(x, y, "tp", mesh=mesh_of(4, AxisType.Explicit), **specs), wanted)


@pytest.mark.parametrize("name", ("gather", "scatter"))
def test_bfloat16_is_summed_in_float32(name):
    """Eight partial sums in bfloat16 would be off by several units in the last place; one rounding at the end is not."""
    (ours, _), _, _, _, in_specs, out_specs = CASES[name]
    shapes = {"gather": ((16, 512), (512, 24)), "scatter": ((16, 512), (24, 512))}[name]
    x, y = (normal(*shape, seed=i, dtype=jnp.bfloat16) for i, shape in enumerate(shapes))
    sharded = {"mesh": mesh_of(8), "in_specs": in_specs, "out_specs": out_specs}
    exact = np.asarray(x, np.float64) @ (np.asarray(y, np.float64).T if name == "scatter" else np.asarray(y, np.float64))
    out = ours(x, y, "tp", **sharded)
    assert out.dtype == jnp.bfloat16
    assert np.abs(np.asarray(out, np.float64) - exact).max() <= 2**-8 * np.abs(exact).max() * 1.01
    wide = ours(x, y, "tp", preferred_element_type=jnp.float32, **sharded)
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(wide), exact, rtol=1e-5, atol=1e-4)


def test_mixed_dtypes_are_multiplied_in_the_common_one():
    x, y = normal(16, 6, dtype=jnp.bfloat16), normal(6, 24)
    out, d_x, d_y = pulled(on_two_devices(), x, y)
    assert (out.dtype, d_x.dtype, d_y.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(np.asarray(out), np.asarray(x, np.float64) @ np.asarray(y, np.float64), rtol=1e-5, atol=1e-5)


def test_nothing_is_gathered_or_reduced_at_once():
    sharded = {"mesh": mesh_of(4), "in_specs": (ROWS, P(None, "tp")), "out_specs": P(None, "tp")}
    run = functools.partial(ejkernel.all_gather_matmul, axis_name="tp", **sharded)
    placed = [
        jax.device_put(a, jax.NamedSharding(mesh_of(4), s))
        for a, s in zip((normal(16, 6), normal(6, 24)), sharded["in_specs"], strict=True)
    ]
    text = jax.jit(jax.grad(lambda x, y: jnp.sum(run(x, y)), (0, 1))).lower(*placed).compile().as_text()
    assert "collective-permute" in text
    assert not any(word in text for word in ("all-gather", "reduce-scatter", "all-to-all", "all-reduce"))


def test_vmap_remat_and_second_derivatives():
    x, y = normal(3, 8, 6), normal(6, 8)
    run = on_two_devices()

    def loss(product, x, y):
        return jnp.sum(jax.vmap(jax.checkpoint(lambda one: jnp.sin(product(one, y))))(x))

    def twice(product):
        return jax.jit(jax.grad(lambda x, y: jnp.sum(jax.grad(loss, 2)(product, x, y) ** 2), (0, 1)))(x, y)

    assert_same(twice(run), twice(functools.partial(jnp.matmul, precision=HIGHEST)), 1e-4)


def test_plain_jax_derivatives():
    x, y = normal(8, 6), normal(6, 8)
    run = on_two_devices()
    with ejkernel.use(custom_gradients=False):
        got = jax.jvp(run, (x, y), (y.T, x.T))
    assert_same(got, jax.jvp(functools.partial(jnp.matmul, precision=HIGHEST), (x, y), (y.T, x.T)))


def test_one_device_is_a_product():
    x, y = normal(5, 6), normal(6, 7)
    sharded = {"mesh": mesh_of(1), "in_specs": (ROWS, P()), "out_specs": P("tp")}
    np.testing.assert_allclose(
        ejkernel.all_gather_matmul(x, y, "tp", **sharded), np.asarray(x) @ np.asarray(y), rtol=1e-5, atol=1e-5
    )


REFUSED = {
    "no axis": (lambda x: ejkernel.all_gather_matmul(x, x.T, None), ValueError, "axis_name: got None, expected a mesh axis"),
    "an axis that is not bound": (
        lambda x: ejkernel.all_gather_matmul(x, x.T, "tp"),
        ValueError,
        r"axis_name: got \('tp',\), expected a mesh axis of a surrounding shard_map",
    ),
    "another number of devices": (
        lambda x: ejkernel.all_gather_matmul(x, x.T, "tp", tp_size=4, mesh=mesh_of(2), in_specs=(ROWS, P()), out_specs=P()),
        ValueError,
        r"tp_size: got 4, expected 2, the number of devices of \('tp',\)",
    ),
    "another inner size": (
        lambda x: ejkernel.all_gather_matmul(x, x, "tp", mesh=mesh_of(2), in_specs=(ROWS, P()), out_specs=P()),
        ValueError,
        r"y: got shape \(8, 6\), expected \[K, N\] with K = 6 as in x",
    ),
    "rows that do not divide": (
        lambda x: ejkernel.reduce_scatter_matmul(
            x[:7], x, "tp", mesh=mesh_of(2), in_specs=(P(None, "tp"),) * 2, out_specs=ROWS
        ),
        ValueError,
        "x: got 7 rows, expected a multiple of the 2 devices",
    ),
    "integers": (lambda x: ejkernel.all_gather_matmul(x.astype(int), x.T, "tp"), TypeError, "x: got dtype int"),
    "an integer result": (
        lambda x: ejkernel.all_gather_matmul(x, x.T, "tp", preferred_element_type=jnp.int32),
        TypeError,
        "preferred_element_type: got dtype int32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call(normal(8, 6))
