"""Level 3, one device: every transform that JAX offers, on the public call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel._plugins.export import EXPORT_DISABLED_CHECKS
from ejkernel._plugins.registry import kernel_registry
from ejkernel.call.arrays import has_gradient
from ejkernel.call.policy import use
from ejkernel.testing.problem import Problem, is_of, seed_of
from ejkernel.testing.sharded import SAME
from ejkernel.utils.tolerance import Tolerance, check_close

__all__ = [
    "test_checkpoint",
    "test_export",
    "test_jit_and_eager_agree",
    "test_nested_vmap_other_axes",
    "test_plain_jax_second_derivatives",
    "test_scan",
    "test_vmap_every_subset",
]

_COPIES = 3


def skip_refused(problem: Problem) -> None:
    """Skip a problem that the platform refuses in either phase."""
    reason = problem.refusal() or problem.refusal("backward")
    if reason is not None:
        pytest.skip(f"{problem.platform} refuses {problem.case.name}: {reason}")


def _floating(arrays: dict[str, Any]) -> list[str]:
    """Floating array arguments. Pytrees (mask descriptions) are left alone."""
    return [n for n, a in arrays.items() if isinstance(a, jax.Array) and has_gradient(a)]


def _with_gradients(problem: Problem, arrays: dict[str, Any]) -> list[str]:
    """The same, none of an operation without gradients."""
    return _floating(arrays) if problem.owner.differentiable else []


def value_and_gradients(problem: Problem) -> Callable[[dict[str, Any]], Any]:
    """Public outputs and the gradients of a fixed random projection of them, as a function of the array arguments."""

    def run(arrays: dict[str, Any]) -> Any:
        names = _with_gradients(problem, arrays)

        def outputs(values: dict[str, Any]) -> Any:
            return problem.owner.invoke({**arrays, **values}, problem.case.options, platform=problem.platform)

        def loss(values: dict[str, Any]) -> Any:
            leaves = jax.tree.leaves(outputs(values))
            return sum(_projected(leaf, index) for index, leaf in enumerate(leaves))

        values = {name: arrays[name] for name in names}
        return outputs(values), jax.grad(loss)(values)

    return run


def _projected(leaf: Any, index: int) -> Any:
    weights = np.random.default_rng(index).standard_normal(leaf.shape).astype(np.float32)
    return jnp.sum(jnp.where(jnp.isfinite(leaf), leaf, 0).astype(jnp.float32) * weights)


def _assert_same(what: str, problem: Problem, got: Any, expected: Any) -> None:
    got, expected = jax.tree.leaves(got), jax.tree.leaves(expected)
    assert len(got) == len(expected)
    for index, pair in enumerate(zip(got, expected, strict=True)):
        check_close(f"{what}, leaf {index}", *pair, SAME[problem.dtype])


def _perturbed(arrays: dict[str, Any], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Copies of the arguments in which the floating ones among `names` differ from copy to copy."""
    floating = {*_floating(arrays), "mask_info"} & set(names)
    return [
        {
            name: jax.tree.map(lambda leaf, k=k: leaf * (1 + 0.25 * k), value)
            if name in floating and isinstance(value, jax.Array)
            else value
            for name, value in arrays.items()
        }
        for k in range(_COPIES)
    ]


def _stacked(copies: list[dict[str, Any]], names: tuple[str, ...], axis: int = 0) -> dict[str, Any]:
    return {
        name: jax.tree.map(lambda *leaves: jnp.stack(leaves, axis), *[copy[name] for copy in copies])
        if name in names
        else value
        for name, value in copies[0].items()
    }


@pytest.mark.ejkernel_level("transforms")
def test_jit_and_eager_agree(transformed: Problem) -> None:
    skip_refused(transformed)
    run = value_and_gradients(transformed)
    _assert_same("jit", transformed, jax.jit(run)(transformed.arrays), run(transformed.arrays))


@pytest.mark.ejkernel_level("transforms")
def test_vmap_every_subset(transformed: Problem) -> None:
    """vmap over each single argument, over each left out, and over all, with gradients, equals a Python loop."""
    skip_refused(transformed)
    run = value_and_gradients(transformed)
    alone = jax.jit(run)
    names = tuple(transformed.arrays)
    subsets = {(name,) for name in names} | {tuple(n for n in names if n != left_out) for left_out in names} | {names}
    for subset in sorted(subset for subset in subsets if subset):
        copies = _perturbed(transformed.arrays, subset)
        mapped = _stacked(copies, subset)
        axes = {name: 0 if name in subset else None for name in names}
        got = jax.jit(jax.vmap(run, in_axes=(axes,)))(mapped)
        expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[alone(copy) for copy in copies])
        _assert_same(f"vmap over {', '.join(subset)}", transformed, got, expected)


@pytest.mark.ejkernel_level("transforms")
def test_nested_vmap_other_axes(transformed: Problem) -> None:
    """vmap of vmap, the inner axis last, over different subsets."""
    skip_refused(transformed)
    run = value_and_gradients(transformed)
    alone = jax.jit(run)
    names = _floating(transformed.arrays)
    first, rest = (names[0],), tuple(names[1:2]) or (names[0],)
    outer = _perturbed(transformed.arrays, first)
    grid = [_perturbed(copy, rest) for copy in outer]
    inner = [_stacked(row, rest, -1) for row in grid]
    mapped = _stacked(inner, first)
    if first != rest:
        mapped = {**mapped, **{name: inner[0][name] for name in rest}}
    axes_inner = {name: -1 if name in rest else None for name in transformed.arrays}
    axes_outer = {name: 0 if name in first else None for name in transformed.arrays}
    got = jax.jit(jax.vmap(jax.vmap(run, in_axes=(axes_inner,)), in_axes=(axes_outer,)))(mapped)
    rows = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *[alone(copy) for copy in row]) for row in grid]
    _assert_same("nested vmap", transformed, got, jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows))


@pytest.mark.ejkernel_level("transforms")
def test_scan(transformed: Problem) -> None:
    skip_refused(transformed)
    run = value_and_gradients(transformed)
    alone = jax.jit(run)
    names = tuple(_floating(transformed.arrays))
    copies = _perturbed(transformed.arrays, names)
    stacked = {name: value for name, value in _stacked(copies, names).items() if name in names}

    def step(carry: Any, values: dict[str, Any]) -> Any:
        return carry + 1, run({**transformed.arrays, **values})

    _, got = jax.jit(lambda values: jax.lax.scan(step, 0, values))(stacked)
    _assert_same("scan", transformed, got, jax.tree.map(lambda *leaves: jnp.stack(leaves), *[alone(copy) for copy in copies]))


@pytest.mark.ejkernel_level("transforms")
@pytest.mark.parametrize("policy", ["nothing", "named"])
def test_checkpoint(transformed: Problem, policy: str) -> None:
    """Rematerialisation gives the same gradients, whether outputs and residuals are saved by name or not at all."""
    skip_refused(transformed)
    owner = transformed.owner
    policies = {
        "nothing": jax.checkpoint_policies.nothing_saveable,
        "named": jax.checkpoint_policies.save_only_these_names(*(f"{owner.name}.{f}" for f in owner.Outputs._fields)),
    }

    def loss(values: dict[str, Any]) -> Any:
        out = owner.invoke({**transformed.arrays, **values}, transformed.case.options, platform=transformed.platform)
        return sum(_projected(leaf, index) for index, leaf in enumerate(jax.tree.leaves(out)))

    values = {name: transformed.arrays[name] for name in _with_gradients(transformed, transformed.arrays)}
    expected = jax.jit(jax.grad(loss))(values)
    _assert_same(policy, transformed, jax.jit(jax.grad(jax.checkpoint(loss, policy=policies[policy])))(values), expected)


@pytest.mark.ejkernel_level("transforms")
def test_export(transformed: Problem) -> None:
    """A program and its gradient survive `jax.export`, serialisation and a call in another function."""
    skip_refused(transformed)
    run = jax.jit(value_and_gradients(transformed))
    leaves, tree = jax.tree.flatten(transformed.arrays)

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(run(jax.tree.unflatten(tree, leaves)))

    exported = jax.export.export(jax.jit(flat), disabled_checks=EXPORT_DISABLED_CHECKS)(*leaves)
    restored = jax.export.deserialize(exported.serialize())
    _assert_same("export", transformed, restored.call(*leaves), flat(*leaves))


@pytest.mark.ejkernel_level("transforms")
def test_plain_jax_second_derivatives(transformed: Problem) -> None:
    """`use(..., custom_gradients=False)`: jvp agrees with the gradient, and the gradient can be differentiated again."""
    plain = any(
        is_of(c, transformed.platform) and c.implementation.plain_jax for c in kernel_registry.candidates(transformed.operation)
    )
    if not plain:
        pytest.skip(f"{transformed.platform} has no plain JAX code for {transformed.operation}; it would need plain_jax=True")
    skip_refused(transformed)
    if not transformed.owner.differentiable:
        pytest.skip(f"{transformed.operation} has no gradients")
    values = {name: transformed.arrays[name] for name in _floating(transformed.arrays)}
    rng = np.random.default_rng(seed_of("direction", transformed.operation))
    direction = {name: jnp.asarray(rng.standard_normal(value.shape), value.dtype) for name, value in values.items()}

    def loss(values: dict[str, Any]) -> Any:
        out = transformed.owner.invoke(
            {**transformed.arrays, **values}, transformed.case.options, platform=transformed.platform
        )
        return sum(_projected(leaf, index) for index, leaf in enumerate(jax.tree.leaves(out)))

    def dot(a: dict[str, Any], b: dict[str, Any]) -> Any:
        return sum(jnp.vdot(a[name], b[name]) for name in a)

    first = jax.grad(loss)(values)
    with use(custom_gradients=False):
        tangent = jax.jvp(loss, (values,), (direction,))[1]
        hessian_direction = jax.grad(lambda v: jax.jvp(loss, (v,), (direction,))[1])(values)
        transposed = jax.grad(lambda v: dot(jax.grad(loss)(v), direction))(values)
    check_close("jvp", tangent, dot(first, direction), Tolerance(1e-3, 1e-3))
    for name, (a, b) in {n: (hessian_direction[n], transposed[n]) for n in values}.items():
        check_close(f"Hessian-vector product of {name}", a, b, Tolerance(1e-3, 5e-3))
