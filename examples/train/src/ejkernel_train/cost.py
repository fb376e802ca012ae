"""Floating-point operations of a step, as the model needs them: what is computed again does not count."""

from __future__ import annotations

import math
from typing import Any

import jax

from ejkernel_train.config import ModelConfig, TrainConfig
from ejkernel_train.feed_forward import Experts
from ejkernel_train.model import Model

PEAK = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12, "NVIDIA A100": 312e12}
"""Dense bfloat16 products with float32 sums, operations per second, from the vendor's data sheets, by the device kind's start."""


def peak_rate() -> float | None:
    """That of the first device, or None where it is not known."""
    kind = jax.devices()[0].device_kind
    return next((rate for name, rate in PEAK.items() if kind.startswith(name)), None)


def parameters(model: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model))


def active_parameters(model: Model) -> float:
    """Those that multiply a token: of experts, the share that a token goes to."""
    config = model.config
    mixtures = [block.feed_forward for block in model.blocks if isinstance(block.feed_forward, Experts)]
    experts = sum(parameters((mixture.gate, mixture.up, mixture.down)) for mixture in mixtures)
    looked_up = 0 if model.head is None else parameters(model.embedding)
    return parameters(model) - looked_up - (experts * (1 - config.experts_per_token / config.experts) if experts else 0)


def mixer_operations(config: ModelConfig, mixer: str, length: int) -> float:
    """Of one sequence's forward in one block, without the products with weights.

    Attention: two products of `2 D` for every pair of a query and a visible key. Recurrences as they are defined, token by
    token, though kernels do more in matrix products: the delta rule has three products with the state, Mamba-2 two.
    """
    if mixer in ("attention", "window_attention", "gated_attention"):
        near = min(config.window, length) if mixer == "window_attention" else length
        return 4 * config.heads * config.head_size * (near * (near + 1) / 2 + (length - near) * near)
    products, size = (3, config.linear_head_size) if mixer == "delta_rule" else (2, config.state_size)
    return 2 * products * config.linear_heads * config.linear_head_size * size * length


def step_operations(config: TrainConfig, model: Model) -> float:
    """`6 N` for every token, N the parameters that multiply it, and three times the forward of the mixers.

    The head counts, the lookup in the embedding does not.
    """
    sizes = config.sizes
    mixers = sizes.repeats * sum(mixer_operations(sizes, mixer, config.length) for mixer in sizes.pattern)
    return 6 * active_parameters(model) * config.batch * config.length + 3 * config.batch * mixers
