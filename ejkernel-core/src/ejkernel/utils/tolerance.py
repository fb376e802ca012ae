"""Tolerances: how far a result may be from the float64 reference. One table for every platform."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Bounds on `|got - expected|`: in the norm of the whole array, and per element against the largest expected value."""

    norm: float
    element: float


FORWARD: Mapping[str, Tolerance] = {
    "float64": Tolerance(1e-7, 1e-6),
    "float32": Tolerance(5e-6, 5e-5),
    "bfloat16": Tolerance(8e-3, 4e-2),
    "float16": Tolerance(1e-3, 6e-3),
    "iterated bfloat16": Tolerance(4e-2, 1e-1),
}
GRADIENT: Mapping[str, Tolerance] = {
    "float64": Tolerance(1e-6, 1e-5),
    "float32": Tolerance(2e-5, 2e-4),
    "bfloat16": Tolerance(1.6e-2, 8e-2),
    "float16": Tolerance(2.5e-3, 1.5e-2),
}
"""Statistics stay in float32 on every platform, so float64 results are only as good as the residuals. Iterated: each step of an
iteration rounds, and amplifies what the step before has rounded."""

EXTREME = Tolerance(2e-3, 2e-2)
"""For cases tagged "extreme", in float32: a log-sum-exp of 1e4 has a spacing of 1e-3, and weights are recomputed from it."""


@dataclasses.dataclass(frozen=True)
class Deviation:
    """Measured distance from the reference, on the scales of `Tolerance`."""

    norm: float
    element: float

    def within(self, tolerance: Tolerance) -> bool:
        return self.norm <= tolerance.norm and self.element <= tolerance.element


def deviation(got: Any, expected: Any, floor: float = 0.0) -> Deviation:
    """Distance of a result from its float64 reference; equal infinities agree, any NaN is infinitely far.

    Args:
        got: the result.
        expected: what it should be.
        floor: size below which expected values do not shrink the scale, for results that are sums of cancelling terms.
    """
    got = np.asarray(got).astype(np.float64)
    expected = np.asarray(expected).astype(np.float64)
    if got.shape != expected.shape:
        raise AssertionError(f"shape {got.shape}, expected {expected.shape}")
    if not got.size:
        return Deviation(0.0, 0.0)
    same = got == expected
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(got - expected))
    if not np.all(np.isfinite(difference)):
        return Deviation(np.inf, np.inf)
    finite = np.where(np.isfinite(expected), expected, 0.0)
    norm = max(np.linalg.norm(finite), floor * np.sqrt(finite.size))
    largest = max(np.max(np.abs(finite)), floor)
    return Deviation(
        float(np.linalg.norm(difference) / (norm if norm > 0 else 1.0)),
        float(np.max(difference) / (largest if largest > 0 else 1.0)),
    )


def deviation_on_device(got: Any, expected: Any, floor: float = 0.0) -> Deviation:
    """As `deviation`, for JAX arrays too large to be brought to the host; in float32."""
    import jax
    import jax.numpy as jnp

    if got.shape != expected.shape:
        raise AssertionError(f"shape {got.shape}, expected {expected.shape}")

    @jax.jit
    def measure(got: Any, expected: Any) -> Any:
        got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
        difference = jnp.where(got == expected, 0.0, jnp.abs(got - expected))
        finite = jnp.where(jnp.isfinite(expected), expected, 0.0)
        sizes = [jnp.sqrt(jnp.sum(x * x)) for x in (difference, finite)]
        return *sizes, jnp.max(difference, initial=0.0), jnp.max(jnp.abs(finite), initial=0.0)

    distance, norm, worst, largest = (float(x) for x in measure(got, expected))
    if not np.isfinite(distance + worst):
        return Deviation(np.inf, np.inf)
    norm, largest = max(norm, floor * got.size**0.5), max(largest, floor)
    return Deviation(distance / (norm or 1.0), worst / (largest or 1.0))


def check_close(what: str, got: Any, expected: Any, tolerance: Tolerance, floor: float = 0.0) -> Deviation:
    """Raise `AssertionError` with the numbers when a result is further from the reference than allowed."""
    measured = deviation(got, expected, floor)
    if not measured.within(tolerance):
        raise AssertionError(f"{what}: {measured}, allowed {tolerance}")
    return measured
