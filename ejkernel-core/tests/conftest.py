"""Fixtures of core's tests: implementations that record when they are traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import pytest

from ejkernel import kernel_registry
from ejkernel.operations.rms_norm.interface import RmsNormInputs, RmsNormOutputs


def plain_forward(call: Any, inputs: RmsNormInputs, config: Any) -> RmsNormOutputs:
    """rms_norm without offset, float32, for tests of the machinery."""
    rstd = 1 / jnp.sqrt(jnp.mean(inputs.x**2, -1) + call.epsilon)
    scale = 1.0 if inputs.scale is None else inputs.scale.reshape(-1, *[1] * (inputs.x.ndim - 2), inputs.x.shape[-1])
    return RmsNormOutputs(inputs.x * rstd[..., None] * scale, rstd if call.save_residuals else None)


@pytest.fixture
def registered() -> Iterator[Callable[..., list[Any]]]:
    """`registered(platform, **record)` registers a recording rms_norm forward and returns the list of calls it traced."""
    added: list[tuple[str, str]] = []

    def add(platform: str, **record: Any) -> list[Any]:
        traced: list[Any] = []

        def forward(call: Any, inputs: Any, config: Any) -> Any:
            traced.append(call)
            return plain_forward(call, inputs, config)

        kernel_registry.register("rms_norm", platform, **record)(forward)
        added.append((platform, record.get("variant", "")))
        return traced

    yield add
    for platform, variant in added:
        kernel_registry.unregister("rms_norm", platform, variant=variant)
