"""What an Auto mesh needs of a phase: `custom_partitioning` takes no program that holds arrays of its own."""

from __future__ import annotations

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import pytest

from ejkernel.operations import get_operation
from ejkernel.plugin import Target
from ejkernel.testing.problem import cases_of, operations_of
from ejkernel.testing.shapes import shapes_of
from ejkernel_triton._jax_triton import intercept_launches

H200 = Target("gpu", "NVIDIA H200", "9.0")


def unset(kernel, inputs, outputs, **options):
    """In the place of a launch: results of the right shapes."""
    return [jnp.zeros(shape, dtype) for shape, dtype in outputs]


def constants_of(name, case):
    """Arrays that the traced phases of a case hold; none for a phase that is refused or absent."""
    parts = (importlib.import_module(f"ejkernel_triton.{name}.{part}") for part in ("kernel", "capability", "config"))
    kernel, capability, config = parts
    found = []

    def both_phases(arrays):
        bound = get_operation(name).canonicalise(**arrays, **case.options)
        call = dataclasses.replace(bound.call, save_residuals=True)
        if capability.supports_forward(call, H200):
            return
        chosen = config.FORWARD.heuristic(call, H200)
        found.extend(jax.make_jaxpr(lambda inputs: kernel.forward(call, inputs, chosen))(bound.inputs).consts)
        if not hasattr(kernel, "backward") or capability.supports_backward(call, H200):
            return
        outputs = kernel.forward(call, bound.inputs, chosen)
        chosen = config.BACKWARD.heuristic(call, H200) if hasattr(config, "BACKWARD") else None
        backward = lambda inputs, outputs, cotangents: kernel.backward(call, inputs, outputs, cotangents, chosen)
        found.extend(jax.make_jaxpr(backward)(bound.inputs, outputs, outputs).consts)

    with intercept_launches(unset):
        jax.eval_shape(both_phases, shapes_of(case, "float32"))
    return found


@pytest.mark.parametrize("name", operations_of("triton"))
def test_no_constants(name):
    held = {case.name: len(constants_of(name, case)) for case in cases_of(name)}
    assert held and not any(held.values())
