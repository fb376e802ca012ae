"""How public models' files hold the parameters of blocks: names, and which way round, joined with which others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ejkernel_train.config import ModelConfig
from ejkernel_train.public_config import model_type

Arrays = tuple[Any, ...]  # of numpy or jax


class Stored(NamedTuple):
    """Arrays of files that hold some of a block's parameters.

    Attributes:
        names: of the arrays, behind `model.layers.N.`.
        parameters: paths in a block.
        write: the files' arrays of the parameters.
        read: the parameters of the files' arrays.
    """

    names: tuple[str, ...]
    parameters: tuple[str, ...]
    write: Callable[..., Arrays]
    read: Callable[..., Arrays]


NAMES = {
    ".mixer_norm": "input_layernorm.weight",
    ".feed_forward_norm": "post_attention_layernorm.weight",
    ".mixer.query_scale": "self_attn.q_norm.weight",
    ".mixer.key_scale": "self_attn.k_norm.weight",
    ".mixer.sinks": "self_attn.sinks",
    ".feed_forward.gate.weight": "mlp.gate_proj.weight",
    ".feed_forward.up.weight": "mlp.up_proj.weight",
    ".feed_forward.down.weight": "mlp.down_proj.weight",
    ".feed_forward.shared.gate.weight": "mlp.shared_expert.gate_proj.weight",
    ".feed_forward.shared.up.weight": "mlp.shared_expert.up_proj.weight",
    ".feed_forward.shared.down.weight": "mlp.shared_expert.down_proj.weight",
    ".feed_forward.share.weight": "mlp.shared_expert_gate.weight",
    ".feed_forward.router.bias": "mlp.router.bias",
    ".feed_forward.down_bias": "mlp.experts.down_proj_bias",
    ".mixer.log_rate": "linear_attn.A_log",
    ".mixer.bias": "linear_attn.dt_bias",
    ".mixer.norm": "linear_attn.norm.weight",
    **{
        f".mixer.{ours}.{part}": f"self_attn.{theirs}_proj.{part}"
        for ours, theirs in {"query": "q", "key": "k", "value": "v", "output": "o"}.items()
        for part in ("weight", "bias")
    },
    **{f".mixer.attention.{ours}.weight": f"self_attn.{theirs}_proj.weight" for ours, theirs in (("key", "k"), ("value", "v"))},
}
"""Of parameters that are arrays of their own. Weights of linear layers lie the other way round in files, `[outputs, inputs]`."""

ROUTERS = {"mixtral": "block_sparse_moe.gate.weight", "gpt_oss": "mlp.router.weight"}
"""Of others it is `mlp.gate.weight`."""

EXPERTS = {
    "mixtral": tuple(f"block_sparse_moe.experts.{{}}.{name}.weight" for name in ("w1", "w3", "w2")),
    "qwen3_moe": tuple(f"mlp.experts.{{}}.{name}_proj.weight" for name in ("gate", "up", "down")),
}
"""Gate, up and down of mixtures where every expert has arrays of its own."""
EXPERTS["qwen3_next"] = EXPERTS["qwen3_moe"]

CENTRED = (".mixer_norm", ".feed_forward_norm", ".mixer.query_scale", ".mixer.key_scale")
"""Scales that files of Qwen3-Next hold as differences from 1."""


def stored(config: ModelConfig, paths: Sequence[str]) -> list[Stored]:
    """All that hold a block's parameters, which have these paths."""
    kind, matrices = model_type(config), (".feed_forward.gate", ".feed_forward.up", ".feed_forward.down")
    names = {**NAMES, ".feed_forward.router.weight": ROUTERS.get(kind, "mlp.gate.weight")}
    found = _of_qwen3_next(config) if kind == "qwen3_next" else _of_gpt_oss() if kind == "gpt_oss" else []
    found += [_of_expert(name, path, config.experts) for name, path in zip(EXPERTS.get(kind, ()), matrices, strict=False)]
    found = [each for each in found if each.parameters[0] in paths]
    joined = {path for each in found for path in each.parameters}
    for path in paths:
        if path not in joined and not path.endswith(".scales"):
            found.append(_centred(names[path], path) if kind == "qwen3_next" and path in CENTRED else _alone(names[path], path))
    return found


def _alone(name: str, path: str) -> Stored:
    def turned(array: Any) -> Arrays:
        return (array.T if path.endswith(".weight") else array,)

    return Stored((name,), (path,), turned, turned)


def _centred(name: str, path: str) -> Stored:
    return Stored((name,), (path,), lambda scale: (scale - 1,), lambda array: (from_centred(array),))


def from_centred(array: np.ndarray) -> np.ndarray:
    """In float32: 1 and a small difference do not fit into bfloat16."""
    return array.astype(np.float32) + 1


def _of_expert(name: str, path: str, experts: int) -> Stored:
    """Of each expert an array."""

    def write(matrices: Any) -> Arrays:
        return tuple(matrices[expert].T for expert in range(experts))

    return Stored(
        tuple(name.format(expert) for expert in range(experts)), (path,), write, lambda *each: (np.stack([x.T for x in each]),)
    )


def _of_gpt_oss() -> list[Stored]:
    """Gate and up alternate; matrices lie as they do here."""

    def write(gate: Any, up: Any) -> Arrays:
        return (_stack([gate, up], -1).reshape(*gate.shape[:-1], -1),)

    def read(joint: np.ndarray) -> Arrays:
        return joint[..., ::2], joint[..., 1::2]

    gate, up = ".feed_forward.gate", ".feed_forward.up"
    experts = "mlp.experts."
    return [
        Stored((f"{experts}gate_up_proj",), (gate, up), write, read),
        Stored((f"{experts}gate_up_proj_bias",), (f"{gate}_bias", f"{up}_bias"), write, read),
        Stored((f"{experts}down_proj",), (".feed_forward.down",), lambda down: (down,), lambda array: (array,)),
    ]


def _of_qwen3_next(config: ModelConfig) -> list[Stored]:
    """Linear layers that read the same are one array, in which their rows alternate by heads."""
    shared, size = config.linear_key_heads, config.linear_head_size
    values = size * config.linear_heads

    def cut(mixed: Any) -> Arrays:  # [d, channels] of queries, keys and values
        return mixed[:, : shared * size], mixed[:, shared * size : 2 * shared * size], mixed[:, 2 * shared * size :]

    def write(mixed: Any, z: Any) -> Arrays:
        return (_by_heads(shared, *cut(mixed), z),)

    def read(joint: np.ndarray) -> Arrays:
        query, key, value, z = _from_heads(shared, joint, shared * size, shared * size, values, values)
        return np.concatenate([query, key, value], axis=1), z

    return [
        Stored(("linear_attn.in_proj_qkvz.weight",), (".mixer.mixed.weight", ".mixer.z.weight"), write, read),
        _joined("linear_attn.in_proj_ba.weight", (".mixer.beta.weight", ".mixer.decay.weight"), shared, config.linear_heads),
        Stored(
            ("linear_attn.conv1d.weight",),
            (".mixer.filters",),
            lambda filters: (filters[:, None],),
            lambda array: (array[:, 0],),
        ),
        *([_alone("linear_attn.out_proj.weight", ".mixer.output.weight")]),
        _joined(
            "self_attn.q_proj.weight",
            (".mixer.attention.query.weight", ".mixer.gate.weight"),
            config.heads,
            config.heads * config.head_size,
        ),
        _alone("self_attn.o_proj.weight", ".mixer.attention.output.weight"),
    ]


def _joined(name: str, paths: tuple[str, str], groups: int, outputs: int) -> Stored:
    """Two linear layers of so many outputs, whose rows alternate by groups."""

    def read(joint: np.ndarray) -> Arrays:
        return _from_heads(groups, joint, outputs, outputs)

    return Stored((name,), paths, lambda first, second: (_by_heads(groups, first, second),), read)


def _by_heads(number: int, *weights: Any) -> Any:
    """`[d, outputs]` each -> `[all outputs, d]`: of every head the rows of all."""
    rows = [weight.T.reshape(number, -1, weight.shape[0]) for weight in weights]
    return _concatenate(rows, 1).reshape(-1, weights[0].shape[0])


def _from_heads(number: int, joint: np.ndarray, *outputs: int) -> Arrays:
    """The other way round."""
    rows = joint.reshape(number, -1, joint.shape[1])
    ends = np.cumsum([size // number for size in outputs])[:-1]
    return tuple(each.reshape(-1, joint.shape[1]).T for each in np.split(rows, ends, axis=1))


def _concatenate(arrays: list[Any], axis: int) -> Any:
    return (np if isinstance(arrays[0], np.ndarray) else jnp).concatenate(arrays, axis)


def _stack(arrays: list[Any], axis: int) -> Any:
    return (np if isinstance(arrays[0], np.ndarray) else jnp).stack(arrays, axis)


FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""The numbers of e2m1 without a sign, by their bits."""


def from_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """bfloat16 `[E, K, N]`, which holds these numbers exactly, of uint8 `[E, N, K / 32, 16]` and `[E, N, K / 32]`.

    A byte has two numbers of e2m1, the lower bits first; 32 share a scale, a power of 2 (OCP Microscaling Formats, 2023).
    """
    of_bits = np.concatenate([FLOAT4, -FLOAT4])
    of_byte = np.stack([np.tile(of_bits, 16), np.repeat(of_bits, 16)], axis=-1)  # [256, 2]
    factors = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan))
    experts, rows = blocks.shape[:2]
    found = np.empty((experts, rows, blocks.shape[2] * 32), jnp.bfloat16)
    for expert in range(experts):
        numbers = of_byte[blocks[expert]].reshape(*scales.shape[1:], 32) * factors[scales[expert]][..., None]
        found[expert] = numbers.reshape(rows, -1)
    return found.swapaxes(1, 2)
