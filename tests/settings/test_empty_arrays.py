"""Every public function with arrays that have no elements along one axis: refused in words, or right over a mesh too."""

from __future__ import annotations

import functools
from typing import Any

import jax
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
