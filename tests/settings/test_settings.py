"""Every public function under JAX's settings and meshes: values and gradients are those without them."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from public_calls import CALLS, PublicCall
from same_results import check, expected, results

from ejkernel._plugins.catalog import FUNCTIONS

SPLIT = {"b": "data", "h": "model", "k": "model", "m": "model"}
"""Mesh axes by the named axes of `public_calls`."""


@pytest.mark.tree
def test_every_public_function_is_called():
    assert {*CALLS} == {*FUNCTIONS}


def mesh_of(shape: tuple[int, int], kind: AxisType) -> Any:
    if len(jax.devices()) < np.prod(shape):
        pytest.skip(f"needs {np.prod(shape)} devices, this machine has {len(jax.devices())}")
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind,) * 2)


def placed(call: PublicCall, arrays: dict[str, Any], mesh: Any, leading: tuple[Any, ...] = ()) -> dict[str, Any]:
    """The arrays on a mesh, axes split as `SPLIT` says and before them `leading` ones."""

    def spec(name: str) -> PartitionSpec:
        axes = (SPLIT.get(axis) for axis in call.axes[name].split())
        return PartitionSpec(*leading, *(None if axis in leading else axis for axis in axes))

    return {name: jax.device_put(value, NamedSharding(mesh, spec(name))) for name, value in arrays.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CALLS)
def test_no_implicit_promotion(name, dtype):
    call = CALLS[name]
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        got = jax.jit(functools.partial(results, call))(call.in_dtype(dtype))
    check(got, expected(name, dtype), 0)


@pytest.mark.parametrize("shape", [(2, 2), (1, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_explicit_mesh(name, shape):
    """Axes of one device are part of the types too; gradients are split as their inputs are."""
    call, mesh = CALLS[name], mesh_of(shape, AxisType.Explicit)
    arrays = placed(call, call.in_dtype("float32"), mesh)
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(results, call))(arrays)
    check(got, expected(name, "float32"))
    assert {name: value.sharding.spec for name, value in got[1].items()} == {
        name: arrays[name].sharding.spec for name in got[1]
    }


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", CALLS)
def test_arrays_that_are_not_on_the_mesh(name, kind):
    call, mesh = CALLS[name], mesh_of((2, 2), kind)
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(results, call))(call.in_dtype("float32"))
    check(got, expected(name, "float32"))


@pytest.mark.parametrize("name", CALLS)
def test_vmap_over_an_axis_that_is_split(name):
    call, mesh = CALLS[name], mesh_of((2, 2), AxisType.Explicit)
    twice = {name: jnp.stack([value, value]) for name, value in call.in_dtype("float32").items()}
    with jax.set_mesh(mesh):
        got = jax.jit(jax.vmap(functools.partial(results, call)))(placed(call, twice, mesh, ("data",)))
    for member in range(2):
        check(jax.tree.map(lambda leaf, member=member: jax.device_get(leaf)[member], got), expected(name, "float32"))


FOR_ONE_NUMBER = {"ragged_decode_attention"}
"""Whose plan is made for a number of requests."""

DERIVED = {"query_start_loc": ("r", "r + 1"), "rows": ("n", "2*n")}
"""Sizes that are computed from others: by an array's name, of which axis and how."""


def exported(call: PublicCall, axis: str) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
    """How to export a call, and its arrays with a symbolic axis."""
    scope = jax.export.SymbolicScope()

    def described(name: str, array: Any) -> jax.ShapeDtypeStruct:
        of, size_of = DERIVED.get(name, ("", ""))
        axes = [*zip(call.axes[name].split(), array.shape, strict=True)]
        sizes = [axis if one == axis else str(size) for one, size in axes]
        if of == axis:
            sizes[0] = size_of
        shape = jax.export.symbolic_shape(", ".join(sizes), scope=scope) if sizes else ()
        return jax.ShapeDtypeStruct(shape, array.dtype)

    shapes = {name: described(name, array) for name, array in call.in_dtype("float32").items()}
    return jax.export.export(jax.jit(call.run)), shapes


def with_axis(*names: str) -> list[tuple[str, str]]:
    return [
        (name, axis)
        for name, call in CALLS.items()
        for axis in names
        if any(axis in axes.split() for axes in call.axes.values())
    ]


@pytest.mark.parametrize(("name", "axis"), with_axis("b"))
def test_export_with_a_symbolic_batch(name, axis):
    call = CALLS[name]
    export, shapes = exported(call, axis)
    if name in FOR_ONE_NUMBER:
        with pytest.raises(ValueError, match="got a symbolic number of requests, b, expected a number"):
            export(shapes)
    else:
        check(export(shapes).call(call.in_dtype("float32")), expected(name, "float32")[0])


@pytest.mark.unsampled
@pytest.mark.parametrize(("name", "axis"), with_axis("t", "n", "r", "p"))
def test_export_with_another_symbolic_size(name, axis):
    """Lengths, tokens, requests and pages: the program is right, or one sentence says what must be a number."""
    call = CALLS[name]
    export, shapes = exported(call, axis)
    refused = ""
    try:
        program = export(shapes)
    except ValueError as error:
        refused = str(error)
    if refused:
        assert re.fullmatch(r"\w+: got .+, expected .+", refused)
    else:
        check(program.call(call.in_dtype("float32")), expected(name, "float32")[0])


@pytest.mark.parametrize("name", ["grouped_matmul", "unified_attention", "flash_attention"])
def test_a_symbolic_size_is_named(name):
    axis, argument = {"flash_attention": ("t", "query")}.get(name, ("n", next(iter(CALLS[name].arrays))))
    export, shapes = exported(CALLS[name], axis)
    said = rf"^{argument}: got a symbolic size, {axis}, of axis \d, expected a number; export one program for each size"
    with pytest.raises(ValueError, match=said):
        export(shapes)
