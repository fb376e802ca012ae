"""What devices send each other in every public function, read from the compiled programs: the least that the mathematics needs."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import pytest
from jax.sharding import AxisType
from public_calls import CALLS, PublicCall
from same_results import results
from test_settings import SPLIT, mesh_of, placed

MEANS = ("fused_cross_entropy", "fused_kl_divergence")
"""Functions that sum over the tokens of all devices."""

GATHERED = {
    "deepseek_attn": ("query_index", "index_weights"),  # every device ranks keys by the sum over the heads of all
    "ragged_page_attention_v3": ("keys", "values"),  # pages that are whole hold the heads of all
}
"""Arrays of which every device needs all."""

_COLLECTIVE = re.compile(r" = (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
_ARRAY = re.compile(r"\w+\[([\d,]*)\]")


def collectives(function: Any, arrays: dict[str, Any], mesh: Any) -> list[tuple[str, int]]:
    """The kind of each, and the elements of its results on one device."""
    with jax.set_mesh(mesh):
        text = jax.jit(function).lower(arrays).compile().as_text() or ""

    def elements(shape: str) -> int:
        return sum(math.prod(int(size) for size in dims.split(",") if size) for dims in _ARRAY.findall(shape))

    return [(kind, elements(shape)) for shape, kind in _COLLECTIVE.findall(text)]


def to_be_summed(call: PublicCall) -> dict[str, int]:
    """Elements of the arrays that have gradients and are whole along a mesh axis that splits others."""

    def axes(name: str) -> set[str]:
        return {SPLIT[axis] for axis in call.axes[name].split() if axis in SPLIT}

    every = set().union(*(axes(name) for name in call.axes))
    return {name: call.arrays[name].size for name in call.floating if axes(name) != every}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", CALLS)
def test_forward(name, kind):
    call, mesh = CALLS[name], mesh_of((2, 2), kind)
    found = collectives(call.run, placed(call, call.in_dtype("float32"), mesh), mesh)
    assert {collective for collective, _ in found} <= {*["all-reduce"] * (name in MEANS), *["all-gather"] * (name in GATHERED)}
    gathered = sum(size for collective, size in found if collective == "all-gather")
    assert gathered <= sum(call.arrays[each].size for each in GATHERED.get(name, ()))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.floating])
def test_gradients(name, kind):
    """They are summed once where an array is whole, and nothing else moves."""
    call, mesh = CALLS[name], mesh_of((2, 2), kind)
    arrays = placed(call, call.in_dtype("float32"), mesh)
    forward = sum(size for _, size in collectives(call.run, arrays, mesh))
    found = collectives(functools.partial(results, call), arrays, mesh)
    assert {collective for collective, _ in found} <= {"all-reduce", "all-gather"}
    assert sum(size for _, size in found) <= forward + sum(to_be_summed(call).values()) + SCALARS


SCALARS = 8
"""The projection of the outputs whose gradient is taken, and sums of scalar outputs."""
