"""Helpers of the random searches: one drawn problem against the float64 reference, and `vmap` over drawn axes against a loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from ejkernel.call import has_gradient
from ejkernel.call.case import Case
from ejkernel.operations import get_operation
from ejkernel.testing.problem import Problem
from ejkernel.utils.tolerance import FORWARD, GRADIENT, check_close

FEW = hypothesis.settings(max_examples=4, deadline=None, derandomize=True, database=None)
"""For every run of the tests."""
MANY = hypothesis.settings(max_examples=300, deadline=None, derandomize=True, database=None)
"""For tests marked `slow`."""
FLOOR = {"float32": 1e-1, "bfloat16": 1.0, "float16": 1.0}
"""Results may be sums of cancelling terms of size 1: errors are measured on this scale at least. The terms themselves (weights of
attention, unpacked matrices) are rounded to half precision where the inputs are, so that there it is their size."""

dtypes = st.sampled_from(("float32", "float32", "bfloat16", "float16"))
seeds = st.integers(0, 2**32 - 1)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), strategy)


def check_problem(
    operation: str,
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    dtype: str,
    *,
    config: Any = None,
    floor: float | None = None,
) -> None:
    """Every output and every gradient of the XLA platform against the reference.

    Args:
        operation: name of the operation.
        arrays: array arguments of its `canonicalise`; NumPy, float32 ones are cast to `dtype`.
        options: its other arguments.
        dtype: "float32", "bfloat16" or "float16".
        config: config of the implementation; None = as dispatched.
        floor: size below which expected values do not shrink the scale of the error; None = `FLOOR` of the dtype.
    """
    floor = FLOOR[dtype] if floor is None else floor
    problem = Problem(operation, Case("drawn", lambda _: arrays, options), dtype, "xla")
    expected = problem.expected_outputs
    for name, value in problem.outputs(config).items():
        check_close(name, value, getattr(expected, name), FORWARD[dtype], floor)
    gradients = problem.gradients(config)
    assert gradients.keys() == problem.differentiable.keys()
    for name, value in gradients.items():
        assert value.dtype == problem.differentiable[name].dtype
        check_close(f"gradient of {name}", value, problem.expected_gradients[name], GRADIENT[dtype], floor)


@st.composite
def mapped_axes(draw: Any, arrays: Mapping[str, Any]) -> dict[str, int | None]:
    """`in_axes` for `check_vmap`: any axis of a subset of the arrays that is not empty."""
    axes = {name: draw(maybe(st.integers(0, np.ndim(value)))) for name, value in arrays.items()}
    if all(axis is None for axis in axes.values()):
        axes[next(iter(axes))] = 0
    return axes


def check_vmap(
    operation: str, arrays: Mapping[str, Any], options: Mapping[str, Any], axes: Mapping[str, int | None], size: int = 3
) -> None:
    """`vmap` of value and gradients over these axes equals a Python loop. Mapped float32 arrays differ from member to member."""

    @jax.jit
    def run(arrays: dict[str, Any]) -> Any:
        moving = {name: value for name, value in arrays.items() if has_gradient(value)}

        def outputs(values: dict[str, Any]) -> Any:
            found = jax.tree.leaves(get_operation(operation).invoke({**arrays, **values}, options, platform="xla"))
            return [leaf for leaf in found if has_gradient(leaf)]

        found, pull = jax.vjp(outputs, moving)
        return found, pull([jnp.where(jnp.isfinite(leaf), jnp.sin(leaf), 0).astype(leaf.dtype) for leaf in found])[0]

    arrays = {name: jnp.asarray(value) for name, value in arrays.items()}
    dtype = max((str(a.dtype) for a in arrays.values() if has_gradient(a)), key=lambda known: GRADIENT[known].norm)
    members = [
        {
            name: value * (1 + 0.25 * k) if axes[name] is not None and value.dtype == jnp.float32 else value
            for name, value in arrays.items()
        }
        for k in range(size)
    ]
    stacked = {
        name: members[0][name] if axes[name] is None else jnp.stack([member[name] for member in members], axes[name])
        for name in arrays
    }
    got = jax.jit(jax.vmap(run, in_axes=(dict(axes),)))(stacked)
    wanted = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[run(member) for member in members])
    for leaf, expected in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        check_close(f"vmap over {axes}", leaf, expected, GRADIENT[dtype], FLOOR[dtype])
