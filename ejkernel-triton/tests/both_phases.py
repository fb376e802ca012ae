"""Helpers: both phases of a kernel module, as a test has them launched, beside the operation's float64 reference."""

from __future__ import annotations

import importlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.testing.checks import widened
from ejkernel.utils.tolerance import deviation


def cotangents_of(operation: Any, call: Any) -> Any:
    """Random ones of every output that the call has."""
    specs, rng = operation.output_specs(call), np.random.default_rng(1)
    return operation.Outputs(*(spec and jnp.asarray(rng.standard_normal(spec.shape), spec.dtype) for spec in specs))


def check_phases(
    operation: Any,
    kernel: Any,
    call: Any,
    inputs: Any,
    choices: tuple[Any, Any],
    limits: tuple[float, float] = (2e-6, 1e-5),
    cotangents: Any = None,
) -> tuple[Any, Any]:
    """Every output and every gradient by its relative error in the norm; returns them.

    Args:
        operation: the operation.
        kernel: a module with `forward` and `backward`.
        call: the canonical call.
        inputs: its inputs.
        choices: configs of the two phases.
        limits: largest errors of outputs and of gradients, below 1e-3 of which a gradient's norm does not count.
        cotangents: None for `cotangents_of`.
    """
    cotangents = cotangents_of(operation, call) if cotangents is None else cotangents
    reference = importlib.import_module(f"ejkernel.operations.{operation.name}.reference")
    outputs = kernel.forward(call, inputs, choices[0])
    gradients = kernel.backward(call, inputs, outputs, cotangents, choices[1])
    with np.errstate(all="ignore"):
        exact = reference.forward(call, widened(inputs))
        wanted = reference.backward(call, widened(inputs), exact, widened(cotangents))
    for name, like in exact._asdict().items():
        value = getattr(outputs, name)
        assert (value is None) == (like is None), name
        assert value is None or deviation(value, like).norm < limits[0], name
    for name, like in wanted._asdict().items():
        value = getattr(gradients, name)
        assert (value is None) == (like is None), name
        if value is not None:
            assert value.dtype == getattr(inputs, name).dtype, name
            assert deviation(value, like, floor=1e-3).norm < limits[1], name
    return outputs, gradients
