"""Helpers: run an operation on XLA beside its float64 NumPy reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_numpy import assert_close, is_float

from ejkernel.call import Request, has_gradient, named, policy as _policy
from ejkernel.operations import get_operation, operation_module
from ejkernel.targets import target as _target

TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3}


def problems(operation: str) -> Any:
    """Parametrise a test by `case` (benchmark sizes left out) and `dtype`; the conformance suite tries narrow dtypes too."""
    cases = operation_module(operation, "cases").CASES
    cases = [case for case in cases if not case.is_benchmark and "nan" not in case.tags]  # the suite compares around NaN
    rows = [(case, dtype) for case in cases for dtype in TOLERANCE]
    rows = [(case, dtype) for case, dtype in rows if case.fits(dtype)]
    marks = {dtype: () if dtype == "float32" else (pytest.mark.slow,) for dtype in TOLERANCE}
    named = [pytest.param(case, dtype, id=f"{case.name}-{dtype}", marks=marks[dtype]) for case, dtype in rows]
    return pytest.mark.parametrize(("case", "dtype"), named)


def cases_named(operation: str, *names: str) -> Any:
    """Parametrise a test by `case`, over these cases."""
    cases = {case.name: case for case in operation_module(operation, "cases").CASES}
    return pytest.mark.parametrize("case", [pytest.param(cases[name], id=name) for name in names])


def case_arrays(case: Any, dtype: str = "float32", seed: int = 0) -> dict[str, Any]:
    """The case's arrays as JAX arrays, floats in `dtype`."""
    arrays = case.arrays(np.random.default_rng(seed))
    return {name: jnp.asarray(value, dtype if has_gradient(value) else None) for name, value in arrays.items()}


def runner(operation: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The operation on XLA as a function of its arrays by keyword."""
    return lambda **arrays: get_operation(operation).invoke(arrays, options, platform="xla")


def check_case(name: str, case: Any, dtype: str) -> None:
    """Forward, public result and every gradient, against the reference on the same rounded inputs."""
    operation = get_operation(name)
    reference = operation_module(name, "reference")
    arrays = case_arrays(case, dtype)
    bound = operation.canonicalise(**arrays, **case.options)
    request = Request(operation, bound.call, _target.resolve_target(()), _policy.policy_for_call(name, "xla"))
    inputs64 = jax.tree.map(lambda a: np.asarray(a, np.float64) if is_float(a) else np.asarray(a), bound.inputs)
    saved = dataclasses.replace(bound.call, save_residuals=True)
    outputs64 = reference.forward(saved, inputs64)

    differentiable = operation.moving(bound.inputs)
    outputs, pull = jax.vjp(lambda values: operation.run(request, bound.inputs._replace(**values)), differentiable)
    rng = np.random.default_rng(1)
    cotangents = jax.tree.map(lambda out: jnp.asarray(rng.standard_normal(out.shape), out.dtype), outputs)
    (gradients,) = pull(cotangents)
    cotangents64 = jax.tree.map(lambda a: np.asarray(a, np.float64), cotangents)
    gradients64 = reference.backward(saved, inputs64, outputs64, cotangents64)

    tolerance = TOLERANCE[dtype]
    for key, value in named(outputs):
        assert_close(value, getattr(outputs64, key), tolerance, key)
    assert {key for key, _ in named(gradients64) if has_gradient(getattr(bound.inputs, key))} == set(gradients)
    for key, value in gradients.items():
        assert value.dtype == differentiable[key].dtype
        assert_close(value, getattr(gradients64, key), tolerance, f"gradient of {key}")
    public = runner(name, case.options)(**arrays)
    for got, wanted in zip(jax.tree.leaves(public), jax.tree.leaves(bound.finish(outputs64)), strict=True):
        assert_close(got, wanted, tolerance, "public result")


def check_vmap(name: str, case: Any, *, tries: int = 2) -> None:
    """`vmap` over random axes of random subsets of the arrays equals a loop, forward and gradients."""
    run, size = runner(name, case.options), 3
    members = [case_arrays(case, seed=seed) for seed in range(size)]
    rng = np.random.default_rng(7)
    for _ in range(tries):
        axes = {key: int(rng.integers(-1, value.ndim + 1)) for key, value in members[0].items()}
        axes = {key: None if axis < 0 else axis for key, axis in axes.items()}
        if all(axis is None for axis in axes.values()):
            axes[next(iter(axes))] = 0
        stacked = {
            key: members[0][key] if axis is None else jnp.stack([member[key] for member in members], axis)
            for key, axis in axes.items()
        }
        member_of = [{key: member[key] if axes[key] is not None else members[0][key] for key in axes} for member in members]

        @jax.jit
        def value_and_gradients(arrays: dict[str, Any]) -> Any:
            floats = {key: value for key, value in arrays.items() if has_gradient(value)}
            outputs, pull = jax.vjp(lambda floats: run(**{**arrays, **floats}), floats)
            return outputs, pull(jax.tree.map(jnp.sin, outputs))[0]

        got = jax.jit(jax.vmap(value_and_gradients, in_axes=(axes,)))(stacked)
        wanted = [value_and_gradients(arrays) for arrays in member_of]
        wanted = jax.tree.map(lambda *leaves: jnp.stack(leaves), *wanted)
        for leaf, expected in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert_close(leaf, expected, 1e-5, str(axes))


def check_second_order(function: Callable[..., Any], plain: Callable[..., Any], *arrays: Any) -> None:
    """Hessian under `custom_gradients=False`, and value and gradient under `jit`, equal those of a plain formula."""
    from ejkernel import use

    def scalar(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *values: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(f(*values)))

    which = tuple(range(len(arrays)))
    with use("xla", custom_gradients=False):
        second = jax.jit(jax.hessian(scalar(function), argnums=which))(*arrays)
    for got, wanted in zip(
        jax.tree.leaves(second), jax.tree.leaves(jax.jit(jax.hessian(scalar(plain), argnums=which))(*arrays)), strict=True
    ):
        assert_close(got, wanted, 5e-5, "hessian")
    first = jax.jit(jax.value_and_grad(scalar(function), argnums=which))(*arrays)
    for got, wanted in zip(
        jax.tree.leaves(first), jax.tree.leaves(jax.jit(jax.value_and_grad(scalar(plain), argnums=which))(*arrays)), strict=True
    ):
        assert_close(got, wanted, 2e-5, "value and gradient under jit")
