"""Every public function with arrays that have no elements along one axis: refused in words, or right over a mesh too."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from public_calls import CALLS
from same_results import check, results
from test_settings import mesh_of, placed

import ejkernel

PAIRS = [
    (name, axis)
    for name, call in CALLS.items()
    for axis in sorted({axis for axes in call.axes.values() for axis in axes.split() if axis.isalpha()})
]


def alone(name: str, axis: str) -> Any:
    """Results on one device, or the refusal."""
    call = CALLS[name].without(axis)
    try:
        return jax.device_get(jax.jit(functools.partial(results, call))(call.in_dtype("float32")))
    except ValueError as error:
        return error


@pytest.mark.parametrize(("name", "axis"), PAIRS)
def test_explicit_mesh(name: str, axis: str):
    """Arrays and gradients are split over axes without elements as over others."""
    wanted = alone(name, axis)
    if isinstance(wanted, ValueError):
        assert ": got " in str(wanted), f"refused in other words: {wanted}"
        return
    call, mesh = CALLS[name].without(axis), mesh_of((2, 2), AxisType.Explicit)
    arrays = placed(call, call.in_dtype("float32"), mesh)
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(results, call))(arrays)
    check(got, wanted)
    assert {name: value.sharding.spec for name, value in got[1].items()} == {
        name: arrays[name].sharding.spec for name in got[1]
    }


@pytest.mark.parametrize("name", CALLS)
def test_vmap_over_an_axis_without_elements(name: str):
    """Of all arrays, and of one beside others that every member shares, with gradients."""
    call = CALLS[name]
    arrays = call.in_dtype("float32")
    run = functools.partial(results, call)
    wanted = jax.tree.map(lambda leaf: (0, *leaf.shape), jax.eval_shape(run, arrays))
    none = {name: jnp.zeros((0, *value.shape), value.dtype) for name, value in arrays.items()}
    first = next(iter(arrays))
    for one in ({first}, {*arrays}):
        axes = {name: 0 if name in one else None for name in arrays}
        mapped = {name: none[name] if name in one else arrays[name] for name in arrays}
        got = jax.jit(jax.vmap(run, in_axes=(axes,)))(mapped)
        assert jax.tree.map(lambda leaf: leaf.shape, got) == wanted


STATES = {
    name: next(one for one in ("initial_state", "state") if one in inspect.signature(getattr(ejkernel, name)).parameters)
    for name in CALLS
    if {"initial_state", "state"} & {*inspect.signature(getattr(ejkernel, name)).parameters}
}
"""Functions that carry a state from call to call, and what they call it."""


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", STATES)
def test_no_tokens_leave_a_state_as_it_is(name: str, packed: bool):
    """Its gradient too, in packed sequences that are all empty as in a batch."""
    call, parameters = CALLS[name], inspect.signature(getattr(ejkernel, name)).parameters
    if packed and "cu_seqlens" not in parameters:
        pytest.skip(f"{name} has no packed sequences; it would need cu_seqlens")
    options = {**call.options, **({"return_state": True} if "return_state" in parameters else {})}
    arrays, bounds = call.in_dtype("float32"), {}
    if packed:
        arrays = {one: value[:1] if call.axes[one].startswith("b ") else value for one, value in arrays.items()}
        bounds = {"cu_seqlens": jnp.array([0, 3, 8])}

    def run(arrays: dict[str, Any]) -> Any:
        found = getattr(ejkernel, name)(**arrays, **options)
        return found[:2] if isinstance(found, tuple) else (found, None)

    state = run({**arrays, **bounds})[1]
    if state is None:
        pytest.skip(f"{name} returns no state")
    state = jax.tree.map(lambda leaf: leaf + 1, state)
    empty = {one: value[:, :0] if "t" in call.axes[one].split() else value for one, value in arrays.items()}
    if name == "gated_delta_product":  # whose keys have other steps than its queries
        empty |= {one: empty[one][:, :0] for one in ("key", "value", "beta")}
    empty |= {one: jnp.zeros_like(value) for one, value in bounds.items()}
    (out, last), pull = jax.vjp(lambda state: run({**empty, STATES[name]: state}), state)
    assert out.size == 0
    cotangents = jax.tree.map(jnp.ones_like, last)
    for got in (last, pull((out, cotangents))[0]):
        expected = state if got is last else cotangents
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), got, expected)


@pytest.mark.unsampled
def test_groups_of_experts_without_tokens():
    weights, experts = ejkernel.moe_route(jnp.zeros((0, 8)), 2, num_groups=4, top_groups=2)
    assert weights.shape == experts.shape == (0, 2)
    rows = jax.vmap(lambda x, e: ejkernel.moe_permute(x, e, 4).rows)(jnp.zeros((0, 5, 8)), jnp.zeros((0, 5, 2), jnp.int32))
    assert rows.shape == (0, 10, 8)


MAPPED = {
    "flash_attention": "t",
    "gla_attention": "v",
    "kernel_delta_attention": "v",
    "retention": "v",
}
"""Functions that take a mesh, and the axis of theirs that is without elements."""


@pytest.mark.unsampled
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", MAPPED)
def test_mesh_as_an_argument(name: str, kind: AxisType):
    """XLA's compiler dies where it is given such arrays, so none go into the manual computation of `mesh=`."""
    call, mesh = CALLS[name].without(MAPPED[name]), mesh_of((2, 2), kind)
    specs = [PartitionSpec("data") if call.axes[array].startswith("b") else PartitionSpec() for array in call.arrays]
    options = {**call.options, "mesh": mesh, "in_specs": specs, "out_specs": PartitionSpec("data")}

    def run(arrays: dict[str, Any]) -> Any:
        return getattr(ejkernel, name)(**arrays, **options)

    def pulled(run: Any, arrays: dict[str, Any]) -> Any:
        outputs, pull = jax.vjp(lambda moving: run({**arrays, **moving}), {name: arrays[name] for name in call.floating})
        return outputs, pull(outputs)[0]

    arrays = call.in_dtype("float32")
    wanted = jax.device_get(jax.jit(functools.partial(pulled, call.run))(arrays))
    given = placed(call, arrays, mesh) if kind == AxisType.Explicit else arrays
    with jax.set_mesh(mesh):
        check(jax.jit(functools.partial(pulled, run))(given), wanted)
