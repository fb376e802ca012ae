"""Every NumPy reference: its backward is the derivative of its forward, and both have the shapes of the contract."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel._plugins.catalog import OPERATIONS
from ejkernel.call import has_gradient, named, parse_dims
from ejkernel.operations import get_operation, operation_module

ATTENTION = ("flash_attention", "block_sparse_attention")
"""Their reference is checked in a module of its own."""

NAMES = tuple(name for name in OPERATIONS if name not in ATTENTION)


def _problems() -> list[Any]:
    cases = [(name, case) for name in NAMES for case in operation_module(name, "cases").CASES]
    smooth = [(name, case) for name, case in cases if not case.is_benchmark and case.tags.isdisjoint({"nan", "kink"})]
    return [pytest.param(name, case, id=f"{name}-{case.name}") for name, case in smooth]


def _as_float64(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array.astype(np.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _weighted_difference(high: Any, low: Any, weights: Any) -> float:
    """Places that are infinite (a log-sum-exp over nothing) have no weight."""
    return sum(
        float(np.vdot(np.where(weight == 0, 0, getattr(high, name) - getattr(low, name)), weight))
        for name, weight in named(weights)
    )


def _check_dimensions(operation: Any, call: Any, arrays: dict[str, Any]) -> None:
    """Every array has the rank that its dims say, and every factor one size; query and key heads (`h`) may differ, and a cache may
    have more key heads than are written."""
    sizes: dict[str, set[int]] = {}
    for name, text in operation.dimensions(call).items():
        if name in arrays:
            for dim, size in zip(parse_dims(text), arrays[name].shape, strict=True):
                sizes.setdefault(dim.factor, set()).update(() if dim.broadcasts and size == 1 else (size,))
    assert {factor: found for factor, found in sizes.items() if len(found) > 1 and factor not in ("h", "key_heads")} == {}


@np.errstate(all="ignore")
@pytest.mark.parametrize(("name", "case"), _problems())
def test_backward_is_the_derivative_of_forward(name: str, case: Any) -> None:
    operation = get_operation(name)
    reference = operation_module(name, "reference")
    rng = np.random.default_rng(0)
    bound = operation.canonicalise(**case.arrays(rng), **case.options)
    call = dataclasses.replace(bound.call, save_residuals=True)
    inputs = operation.Inputs(*(None if value is None else _as_float64(value) for value in bound.inputs))
    outputs = reference.forward(call, inputs)
    specs = operation.output_specs(call)
    assert {key: value.shape for key, value in named(outputs)} == {key: spec.shape for key, spec in named(specs)}

    _check_dimensions(operation, call, {**dict(named(inputs)), **dict(named(outputs))})
    if not operation.differentiable:
        assert not hasattr(reference, "backward")
        return

    cotangents = operation.Outputs(
        **{
            **dict.fromkeys(operation.Outputs._fields),
            **{
                key: rng.standard_normal(spec.shape) * np.isfinite(getattr(outputs, key))
                for key, spec in named(specs)
                if key in operation.public(call) and has_gradient(spec)
            },
        }
    )
    gradients = reference.backward(call, inputs, outputs, cotangents)
    differentiable = {key: getattr(inputs, key) for key in operation.moving(bound.inputs)}
    found = {key: value.shape for key, value in named(gradients) if key in differentiable}
    assert found == {key: value.shape for key, value in differentiable.items()}
    for key, value in differentiable.items():
        moved = np.isfinite(value)
        if "wide-range" in case.tags or case.name.startswith("normalised"):  # such a step would leave 0 far behind
            moved &= value != 0
        direction = np.where(moved, rng.standard_normal(value.shape), 0)
        finite = value[np.isfinite(value)]
        spread = float(np.abs(finite - np.median(finite)).max()) if finite.size else 0.0
        step = 1e-6 * max(1e-3, spread or float(np.abs(finite).max(initial=0)))
        high, low = (reference.forward(call, inputs._replace(**{key: value + s * direction})) for s in (step, -step))
        moving = cotangents._replace(**dict.fromkeys(operation.constants))
        slope = _weighted_difference(high, low, moving) / (2 * step)
        gradient = getattr(gradients, key)
        assert np.isfinite(gradient).all()
        size = np.sqrt(np.sum(gradient**2)) + np.abs(slope)
        assert abs(slope - np.vdot(gradient, direction)) <= 1e-6 * size + 1e-9, key
