"""What is trained and how: frozen dataclasses, and the models and sizes that have names."""

from __future__ import annotations

import dataclasses
from typing import Literal

Mixer = Literal["attention", "gated_attention", "delta_rule", "state_space"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model.

    Attributes:
        pattern: the token mixers of consecutive blocks; `layers` is a multiple of its length.
        width: channels of the residual stream.
        vocabulary: rows of the embedding, which is the head too.
        heads, key_heads, head_size: of attention; each key head serves `heads / key_heads` query heads.
        hidden: channels of the feed-forward layer, of each expert where there are any; 0 for blocks without one.
        experts, experts_per_token: of the mixture; 0 experts for a dense feed-forward layer.
        linear_heads, linear_key_heads, linear_head_size: of the delta rule; the state space has `linear_heads` of this size.
        state_size, groups: of the state space: channels of B and C, and heads of B and C.
        filter: tokens that the short causal convolution sees.
    """

    pattern: tuple[Mixer, ...]
    layers: int
    width: int
    vocabulary: int
    heads: int = 0
    key_heads: int = 0
    head_size: int = 0
    hidden: int = 0
    experts: int = 0
    experts_per_token: int = 0
    linear_heads: int = 0
    linear_key_heads: int = 0
    linear_head_size: int = 0
    state_size: int = 0
    groups: int = 1
    filter: int = 4

    def __post_init__(self) -> None:
        if self.layers % len(self.pattern):
            raise ValueError(f"layers is {self.layers}; make it a multiple of the pattern's {len(self.pattern)} blocks")

    @property
    def repeats(self) -> int:
        return self.layers // len(self.pattern)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run. The same config gives the same batches, and on the same machine the same losses.

    Attributes:
        model, size: a name of `MODELS`, and one of its sizes.
        kernels: "ejkernel", or "plain" for the same model in plain JAX.
        plain: operations that stay in plain JAX with kernels="ejkernel".
        batch, length: sequences of a step, and tokens of each.
        dtype: of products and activations; parameters and moments are float32.
        remat: what the backward computes again: nothing ("none"), all but products of weights ("dots"), whole blocks ("full").
        layers: "scan" compiles one repeat of the pattern, "unroll" all of them.
    """

    model: str = "llama"
    size: str = "tiny"
    kernels: Literal["ejkernel", "plain"] = "ejkernel"
    plain: tuple[str, ...] = ()
    steps: int = 20
    batch: int = 4
    length: int = 128
    seed: int = 0
    learning_rate: float = 3e-3
    warmup: int = 10
    weight_decay: float = 0.1
    clip: float = 1.0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    remat: Literal["none", "dots", "full"] = "none"
    layers: Literal["scan", "unroll"] = "scan"

    @property
    def sizes(self) -> ModelConfig:
        return MODELS[self.model][self.size]


BYTES = 257
"""The vocabulary of tiny models: bytes, and the mark before a document."""

MODELS: dict[str, dict[str, ModelConfig]] = {
    "llama": {
        "tiny": ModelConfig(("attention",), 2, 64, BYTES, heads=4, key_heads=2, head_size=16, hidden=160),
        "125m": ModelConfig(("attention",), 12, 768, 32768, heads=12, key_heads=4, head_size=64, hidden=3072),
        "1.3b": ModelConfig(("attention",), 24, 2048, 128256, heads=16, key_heads=8, head_size=128, hidden=5504),
    },
}

DEFAULTS: dict[str, dict[str, float]] = {
    "tiny": {},
    "125m": {"batch": 16, "length": 2048, "learning_rate": 6e-4, "warmup": 100},
    "1.3b": {"batch": 4, "length": 2048, "learning_rate": 3e-4, "warmup": 100},
}
"""Fields of `TrainConfig` that a size has other defaults for."""
