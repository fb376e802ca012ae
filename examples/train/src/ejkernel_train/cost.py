"""Floating-point operations of a step, as the model needs them: what is computed again does not count."""

from __future__ import annotations

import math
from typing import Any

import jax

from ejkernel_train.config import ModelConfig, TrainConfig

PEAK = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12, "NVIDIA A100": 312e12}
"""Dense bfloat16 products with float32 sums, operations per second, from the vendor's data sheets, by the device kind's start."""


def peak_rate() -> float | None:
    """That of the first device, or None where it is not known."""
    kind = jax.devices()[0].device_kind
    return next((rate for name, rate in PEAK.items() if kind.startswith(name)), None)


def parameters(model: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model))


def mixer_operations(config: ModelConfig, mixer: str, length: int) -> float:
    """Of one sequence's forward in one block, without the products with weights.

    Attention: two products of `2 D` for every pair of a query and a visible key.
    """
    return 4 * config.heads * config.head_size * length * (length + 1) / 2


def step_operations(config: TrainConfig, model: Any) -> float:
    """`6 N` for every token, N the parameters that multiply it, and three times the forward of the mixers.

    The embedding counts once, as the head.
    """
    sizes = config.sizes
    mixers = sizes.repeats * sum(mixer_operations(sizes, mixer, config.length) for mixer in sizes.pattern)
    return 6 * parameters(model) * config.batch * config.length + 3 * config.batch * mixers
