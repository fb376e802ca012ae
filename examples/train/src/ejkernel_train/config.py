"""What is trained and how: frozen dataclasses, and the models and sizes that have names."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

Mixer = Literal["attention", "window_attention", "gated_attention", "delta_rule", "state_space"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model.

    Attributes:
        pattern: the token mixers of consecutive blocks; `layers` is a multiple of its length.
        width: channels of the residual stream.
        vocabulary: rows of the embedding and the head.
        heads, key_heads, head_size: of attention; each key head serves `heads / key_heads` query heads.
        window: tokens that window_attention sees, the last one of which is the token itself.
        attention_bias: linear layers of attention add a bias.
        sinks: attention has a learnt logit for each head beside those of the keys, which takes its share of the softmax.
        hidden: channels of the feed-forward layer, of each expert where there are any; 0 for blocks without one.
        experts, experts_per_token: of the mixture; 0 experts for a dense feed-forward layer.
        expert_bias: the router and the experts add biases.
        shared_hidden: channels of an expert that all tokens go to, behind a gate of its own; 0 for none.
        swiglu_limit, swiglu_alpha: of the experts; with a limit they are clamped as in gpt-oss, see `plain.swiglu`.
        balance: weight of the loss that spreads tokens over the experts.
        linear_heads, linear_key_heads, linear_head_size: of the delta rule; the state space has `linear_heads` of this size.
        state_size, groups: of the state space: channels of B and C, and heads of B and C.
        filter: tokens that the short causal convolution sees.
        float8: large linear layers multiply in float8 with delayed scales.
        tied: the embedding is the head too, and there is no other.
        qk_norm: heads of queries and keys are normed before they are turned, as in Qwen3.
        epsilon: of norms over the width, of queries and keys, and of what the delta rule gives.
        public: what `config.json` of a public model says of its rotation and of the tokens around a document, as JSON, so that it
            can be hashed; "": base 10000, and the mark of `data.py`.
    """

    pattern: tuple[Mixer, ...]
    layers: int
    width: int
    vocabulary: int
    heads: int = 0
    key_heads: int = 0
    head_size: int = 0
    window: int = 0
    attention_bias: bool = False
    sinks: bool = False
    hidden: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_bias: bool = False
    shared_hidden: int = 0
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 1.0
    balance: float = 0.01
    linear_heads: int = 0
    linear_key_heads: int = 0
    linear_head_size: int = 0
    state_size: int = 0
    groups: int = 1
    filter: int = 4
    float8: bool = False
    tied: bool = True
    qk_norm: bool = False
    epsilon: float = 1e-6
    public: str = ""

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
        given: sizes in the place of these, as those of a public model.
        repeats: how often the model's pattern of blocks comes; None for as often as its size says.
        kernels: "ejkernel", "plain" for the same model in plain JAX, or "peers" for it by the best kernels of others.
        plain: operations that stay in plain JAX with kernels="ejkernel".
        batch, length: sequences of a step, and tokens of each.
        accumulate: into how many parts the batch is cut, whose gradients are summed one after the other before the update.
        optimizer: AdamW for all parameters, or Muon for the matrices of blocks.
        dtype: of products and activations; parameters and moments are float32.
        float8: large linear layers multiply in float8 with delayed scales.
        remat: what the backward computes again: nothing ("none"), all but products of weights ("dots"), whole blocks ("full").
        mesh: axes and their devices, "data=2,fsdp=2,tensor=2"; "" for one device. See `sharding.py`.
        layers: "scan" compiles one repeat of the pattern, whose parameters are stacked; "unroll" all of them, each with its own.
        packed: rows are of packed documents, as `data.pack` makes them, and not windows of one text.
        on_nonfinite: what a step does whose loss or gradient is not finite: end the run ("stop"), or change nothing ("skip").
    """

    model: str = "llama"
    size: str = "tiny"
    given: ModelConfig | None = None
    repeats: int | None = None
    kernels: Literal["ejkernel", "plain", "peers"] = "ejkernel"
    plain: tuple[str, ...] = ()
    steps: int = 20
    batch: int = 4
    length: int = 128
    accumulate: int = 1
    seed: int = 0
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 3e-3
    warmup: int = 10
    weight_decay: float = 0.1
    clip: float = 1.0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    float8: bool = False
    remat: Literal["none", "dots", "full"] = "none"
    layers: Literal["scan", "unroll"] = "scan"
    mesh: str = ""
    packed: bool = False
    on_nonfinite: Literal["stop", "skip"] = "stop"

    def __post_init__(self) -> None:
        """Raises:
        ValueError: a field out of its range, by its option on the command line.
        """
        for name, words in {"model": MODELS, "size": DEFAULTS, **WORDS}.items():
            if getattr(self, name) not in words:
                raise ValueError(f"{_option(name)} is {getattr(self, name)!r}; give one of {', '.join(words)}")
        for name, least in {"repeats": 1, "steps": 1, "batch": 1, "length": 1, "accumulate": 1, "warmup": 0, "seed": 0}.items():
            if (value := getattr(self, name)) is not None and not least <= value < 2**31:
                raise ValueError(f"{_option(name)} is {value}; give a number in [{least}, 2**31)")
        for name in ("learning_rate", "clip"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{_option(name)} is {value}; give a finite number above 0")
        if self.batch % self.accumulate:
            raise ValueError(f"--batch is {self.batch}; make it a multiple of --accumulate, {self.accumulate}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"{_option('weight_decay')} is {self.weight_decay}; give a finite number of at least 0")

    @property
    def sizes(self) -> ModelConfig:
        sizes = self.given or MODELS[self.model][self.size]
        layers = sizes.layers if self.repeats is None else self.repeats * len(sizes.pattern)
        return dataclasses.replace(sizes, layers=layers, float8=self.float8)


WORDS: dict[str, tuple[str, ...]] = {
    name: get_args(hint) for name, hint in get_type_hints(TrainConfig).items() if get_origin(hint) is Literal
}
"""The words of fields of `TrainConfig`."""


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


BYTES = 264
"""The vocabulary of tiny models: bytes, the mark before a document, and up to a multiple of 8, so that devices can share it."""


def _llama(layers: int, width: int, vocabulary: int, **sizes: Any) -> ModelConfig:
    return ModelConfig(("attention",), layers, width, vocabulary, **sizes)


def _hybrid(layers: int, width: int, vocabulary: int, *, head_size: int, linear_heads: int, **sizes: Any) -> ModelConfig:
    """As Qwen3-Next: three layers of the gated delta rule to one of gated attention; two value heads to a key head."""
    linear = {"linear_heads": linear_heads, "linear_key_heads": linear_heads // 2, "linear_head_size": head_size}
    pattern: tuple[Mixer, ...] = ("delta_rule", "delta_rule", "delta_rule", "gated_attention")
    return ModelConfig(pattern, layers, width, vocabulary, head_size=head_size, **linear, **sizes)


def _mamba2(layers: int, width: int, vocabulary: int, *, head_size: int, state_size: int) -> ModelConfig:
    """Heads of twice the width together, and no feed-forward layers."""
    linear: dict[str, Any] = {"linear_heads": 2 * width // head_size, "linear_head_size": head_size, "state_size": state_size}
    return ModelConfig(("state_space",), layers, width, vocabulary, **linear)


MODELS: dict[str, dict[str, ModelConfig]] = {
    "llama": {
        "tiny": _llama(2, 64, BYTES, heads=4, key_heads=2, head_size=16, hidden=160),
        "125m": _llama(12, 768, 32768, heads=12, key_heads=4, head_size=64, hidden=3072),
        "1.3b": _llama(24, 2048, 128256, heads=16, key_heads=8, head_size=128, hidden=5504),
    },
    "hybrid": {
        "tiny": _hybrid(4, 64, BYTES, heads=4, key_heads=2, head_size=16, linear_heads=4, hidden=160),
        "125m": _hybrid(12, 768, 32768, heads=6, key_heads=2, head_size=128, linear_heads=8, hidden=2048),
        "1.3b": _hybrid(24, 2048, 128256, heads=16, key_heads=4, head_size=128, linear_heads=32, hidden=3072),
    },
    "mamba2": {
        "tiny": _mamba2(2, 64, BYTES, head_size=32, state_size=16),
        "125m": _mamba2(24, 768, 32768, head_size=64, state_size=128),
        "1.3b": _mamba2(48, 2048, 128256, head_size=64, state_size=128),
    },
    "moe": {
        "tiny": _llama(2, 64, BYTES, heads=4, key_heads=2, head_size=16, hidden=64, experts=4, experts_per_token=2),
        "125m": _llama(12, 768, 32768, heads=12, key_heads=4, head_size=64, hidden=512, experts=8, experts_per_token=2),
        "1.3b": _llama(12, 2048, 128256, heads=16, key_heads=8, head_size=128, hidden=768, experts=16, experts_per_token=4),
    },
}
"""Models by name and size. The sizes count all parameters, of a mixture those of every expert."""

DEFAULTS: dict[str, dict[str, float]] = {
    "tiny": {},
    "125m": {"batch": 16, "length": 2048, "learning_rate": 6e-4, "warmup": 100},
    "1.3b": {"batch": 4, "length": 2048, "learning_rate": 3e-4, "warmup": 100},
}
"""Fields of `TrainConfig` that a size has other defaults for."""
