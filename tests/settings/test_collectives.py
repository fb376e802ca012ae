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

MEANS = {"fused_cross_entropy", "fused_kl_divergence"}
"""Functions that sum over the tokens of all devices."""

GATHERED = {
    "deepseek_attn": ("query_index", "index_weights"),  # every device ranks keys by the sum over the heads of all
    "ragged_page_attention_v3": ("kv_cache",),  # rows of pages that are whole hold the heads of all
}
"""Arrays of which every device needs all; XLA may sum in their place what is computed of them."""

MORE = {
    "mamba3": 128,  # angles of all heads are gathered before they are summed
    # on Auto meshes, where XLA decides:
    "llama_rope": 256,  # parts of queries and of keys are summed apart
    "fused_qk_norm_rope": 256,
    "deepseek_attn": 256,  # so are parts of keys and of scores
    "quantized_matmul": 64 * 32,  # the gradient of the unpacked matrix is summed before those of scales and zeros are formed
}
"""Elements that gradients move beyond what is needed."""

_COLLECTIVE = re.compile(r" = (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
_ARRAY = re.compile(r"\w+\[([\d,]*)\]")


def collectives(function: Any, arrays: dict[str, Any], mesh: Any) -> list[tuple[str, int]]:
    """The kind of each, and the elements of its results on one device."""
    with jax.set_mesh(mesh):
        text = jax.jit(function).lower(arrays).compile().as_text() or ""

    def elements(shape: str) -> int:
        return sum(math.prod(int(size) for size in dims.split(",") if size) for dims in _ARRAY.findall(shape))

    return [(kind, elements(shape)) for shape, kind in _COLLECTIVE.findall(text)]


def to_be_summed(call: PublicCall) -> int:
    """Elements of the arrays that have gradients and are whole along mesh axes that split others, once for each such axis."""

    def axes(name: str) -> set[str]:
        return {SPLIT[axis] for axis in call.axes[name].split() if axis in SPLIT}

    every = set().union(*(axes(name) for name in call.axes))
    return sum(call.arrays[name].size * len(every - axes(name)) for name in call.floating)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", CALLS)
def test_forward(name, kind):
    call, mesh = CALLS[name], mesh_of((2, 2), kind)
    found = collectives(call.run, placed(call, call.in_dtype("float32"), mesh), mesh)
    moved = sum(size for _, size in found if size > 1)  # one number says that no device has more of a loop to do
    assert {kind for kind, _ in found} <= {"all-gather", "all-reduce"}
    assert moved <= sum(call.arrays[each].size for each in GATHERED.get(name, ())) + SCALARS * (name in MEANS)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.floating])
def test_gradients(name, kind):
    """They are summed once where an array is whole, and nothing else moves."""
    call, mesh = CALLS[name], mesh_of((2, 2), kind)
    arrays = placed(call, call.in_dtype("float32"), mesh)
    forward = sum(size for _, size in collectives(call.run, arrays, mesh))
    found = collectives(functools.partial(results, call), arrays, mesh)
    assert {collective for collective, _ in found} <= {"all-reduce", "all-gather"}
    assert sum(size for _, size in found) <= forward + to_be_summed(call) + MORE.get(name, 0) + SCALARS


SCALARS = 8
"""Elements of sums that are one number, such as the projection of the outputs whose gradient is taken."""
