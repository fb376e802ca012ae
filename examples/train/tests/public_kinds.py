"""Folders shaped like gpt-oss and Qwen3-Next with random weights, and their forward passes in float64, from the files alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_train.data import Packed
from ejkernel_train.model import Model
from ejkernel_train.operations import choose

save_file = pytest.importorskip("safetensors.numpy", reason="runs where safetensors is installed").save_file

Shapes = dict[str, tuple[int, ...]]
Arrays = dict[str, np.ndarray]

BASE: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "truncate": False, "original_max_position_embeddings": 16}
GPT_OSS = {
    **BASE,
    "model_type": "gpt_oss",
    "intermediate_size": 32,
    "num_local_experts": 4,
    "num_hidden_layers": 4,
    "attention_bias": True,
    "sliding_window": 7,
    "rope_theta": 1e4,
    "rope_scaling": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "eos_token_id": 256,
}
QWEN3_NEXT = {
    **BASE,
    "model_type": "qwen3_next",
    "num_hidden_layers": 3,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_experts": 4,
    "full_attention_interval": 3,
    "partial_rotary_factor": 0.25,
    "rope_theta": 1e4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "eos_token_id": 256,
}
KINDS = {"gpt_oss": GPT_OSS, "qwen3_next": QWEN3_NEXT, "dense qwen3_next": {**QWEN3_NEXT, "num_experts": 0}}


def arrays(config: dict[str, Any]) -> Arrays:
    """Random ones, by the names that public files have."""
    random, d = np.random.default_rng(0), config["hidden_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (264, d), "lm_head.weight": (264, d), "model.norm.weight": (d,)}
    of_layer = _gpt_oss_shapes if config["model_type"] == "gpt_oss" else _qwen3_next_shapes
    for layer in range(config["num_hidden_layers"]):
        block = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,), **of_layer(config, layer)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    centred = config["model_type"] == "qwen3_next"
    made: Arrays = {}
    for name, shape in shapes.items():
        around = float("norm" in name and not (centred and "linear_attn" not in name))
        made[name] = (random.normal(size=shape) * (0.2 if len(shape) > 1 else 0.3) + around).astype(np.float32)
    for name in made:
        if name.endswith("gate_up_proj"):
            made[name] *= 12  # so that some are clamped
    return made


def _gpt_oss_shapes(config: dict[str, Any], _: int) -> Shapes:
    d, f, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    outputs = {"q": 64, "k": 32, "v": 32}
    return {
        **{f"self_attn.{name}_proj.weight": (size, d) for name, size in outputs.items()},
        **{f"self_attn.{name}_proj.bias": (size,) for name, size in outputs.items()},
        "self_attn.o_proj.weight": (d, 64),
        "self_attn.o_proj.bias": (d,),
        "self_attn.sinks": (4,),
        "mlp.router.weight": (experts, d),
        "mlp.router.bias": (experts,),
        "mlp.experts.gate_up_proj": (experts, d, 2 * f),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * f),
        "mlp.experts.down_proj": (experts, f, d),
        "mlp.experts.down_proj_bias": (experts, d),
    }


def _qwen3_next_shapes(config: dict[str, Any], layer: int) -> Shapes:
    d = config["hidden_size"]
    if (layer + 1) % config["full_attention_interval"]:
        mixer: Shapes = {
            "in_proj_qkvz.weight": (96, d),
            "in_proj_ba.weight": (8, d),
            "conv1d.weight": (64, 1, 4),
            "A_log": (4,),
            "dt_bias": (4,),
            "norm.weight": (8,),
            "out_proj.weight": (d, 32),
        }
        mixer = {f"linear_attn.{name}": shape for name, shape in mixer.items()}
    else:
        mixer = {"q_proj": (128, d), "k_proj": (32, d), "v_proj": (32, d), "o_proj": (d, 64), "q_norm": (16,), "k_norm": (16,)}
        mixer = {f"self_attn.{name}.weight": shape for name, shape in mixer.items()}

    def dense(name: str, hidden: int) -> Shapes:
        return {f"mlp.{name}{part}_proj.weight": (hidden, d) for part in ("gate", "up")} | {
            f"mlp.{name}down_proj.weight": (d, hidden)
        }

    if not config["num_experts"]:
        return mixer | dense("", config["intermediate_size"])
    for expert in range(config["num_experts"]):
        mixer |= dense(f"experts.{expert}.", config["moe_intermediate_size"])
    mixer |= {"mlp.gate.weight": (config["num_experts"], d), "mlp.shared_expert_gate.weight": (1, d)}
    return mixer | dense("shared_expert.", config["shared_expert_intermediate_size"])


def write(folder: Path, config: dict[str, Any], files: Arrays) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(files, folder / "model.safetensors")


def ours(model: Model, tokens: np.ndarray, kernels: str) -> np.ndarray:
    """Logits of one text, by the trainer's forward pass."""
    found: list[jax.Array] = []

    def keep(hidden: jax.Array, head: jax.Array, *_: Any) -> jax.Array:
        found.append(jnp.einsum("btd,vd->btv", hidden, head))
        return jnp.zeros(())

    operations = choose(kernels)._replace(cross_entropy=keep)
    model.losses(Packed(jnp.asarray(tokens)[None], None), operations, "float32")
    return np.asarray(found[0])[0]


def logits(config: dict[str, Any], files: Arrays, tokens: np.ndarray) -> np.ndarray:
    """In float64, of one text."""
    weights = {name: array.astype(np.float64) for name, array in files.items()}
    centred = config["model_type"] == "qwen3_next"

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config["rms_norm_eps"]) * (scale + centred)

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        first = f"model.layers.{layer}."
        own = {name.removeprefix(first): array for name, array in weights.items() if name.startswith(first)}
        normed = norm(x, own["input_layernorm.weight"])
        if "self_attn.sinks" in own:
            window = config["sliding_window"] if config["layer_types"][layer] == "sliding_attention" else len(x)
            x = x + gpt_oss_attention(config, own, normed, window)
            x = x + gpt_oss_experts(config, own, norm(x, own["post_attention_layernorm.weight"]))
            continue
        x = x + (
            gated_attention(config, own, normed, norm) if "self_attn.q_norm.weight" in own else delta_rule(config, own, normed)
        )
        x = x + qwen3_next_experts(config, own, norm(x, own["post_attention_layernorm.weight"]))
    return norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def gpt_oss_attention(config: dict[str, Any], own: Arrays, x: np.ndarray, window: int) -> np.ndarray:
    query, key, value = (
        (x @ own[f"self_attn.{name}_proj.weight"].T + own[f"self_attn.{name}_proj.bias"]).reshape(len(x), -1, 16)
        for name in "qkv"
    )
    said = config["rope_scaling"]
    frequencies = config["rope_theta"] ** (-np.arange(0, 16, 2) / 16)
    turns = said["original_max_position_embeddings"] / (2 * math.pi)
    low, high = (
        16 * math.log(turns / said[name]) / (2 * math.log(config["rope_theta"])) for name in ("beta_fast", "beta_slow")
    )
    stretched = np.clip((np.arange(8) - max(low, 0)) / (min(high, 15) - max(low, 0)), 0, 1)
    frequencies = frequencies * (1 - stretched + stretched / said["factor"])
    factor = 1 + 0.1 * math.log(said["factor"])
    query, key = (factor * turned(each, frequencies) for each in (query, key))
    out = attended(query, key, value, window, own["self_attn.sinks"])
    return out @ own["self_attn.o_proj.weight"].T + own["self_attn.o_proj.bias"]


def turned(x: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """`[T, H, D]`, its first channels by their positions."""
    angles = np.arange(len(x))[:, None, None] * frequencies
    first, second, rest = np.split(x, [len(frequencies), 2 * len(frequencies)], axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attended(query: np.ndarray, key: np.ndarray, value: np.ndarray, window: int, sinks: np.ndarray | None) -> np.ndarray:
    """Token by token and head by head."""
    out = np.zeros(query.shape)
    for at in range(len(query)):
        for head in range(query.shape[1]):
            seen = slice(max(at + 1 - window, 0), at + 1)
            shares = np.exp(key[seen, head // 2] @ query[at, head] / math.sqrt(query.shape[2]))
            total = shares.sum() + (0 if sinks is None else math.exp(sinks[head]))
            out[at, head] = shares / total @ value[seen, head // 2]
    return out.reshape(len(out), -1)


def routed(scores: np.ndarray, number: int) -> Iterator[tuple[int, list[tuple[int, float]]]]:
    """Each token, its experts and their weights."""
    for at, row in enumerate(scores):
        chosen = np.argsort(-row)[:number]
        weights = np.exp(row[chosen]) / np.exp(row[chosen]).sum()
        yield at, list(zip(chosen.tolist(), weights.tolist(), strict=True))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gpt_oss_experts(config: dict[str, Any], own: Arrays, x: np.ndarray) -> np.ndarray:
    out = np.zeros(x.shape)
    scores = x @ own["mlp.router.weight"].T + own["mlp.router.bias"]
    for at, experts in routed(scores, config["num_experts_per_tok"]):
        for expert, weight in experts:
            both = x[at] @ own["mlp.experts.gate_up_proj"][expert] + own["mlp.experts.gate_up_proj_bias"][expert]
            gate, up = np.minimum(both[::2], 7), np.clip(both[1::2], -7, 7)
            gated = gate * sigmoid(1.702 * gate) * (up + 1)
            out[at] += weight * (gated @ own["mlp.experts.down_proj"][expert] + own["mlp.experts.down_proj_bias"][expert])
    return out


def gated_attention(config: dict[str, Any], own: Arrays, x: np.ndarray, norm: Any) -> np.ndarray:
    both = (x @ own["self_attn.q_proj.weight"].T).reshape(len(x), -1, 32)
    key, value = ((x @ own[f"self_attn.{name}_proj.weight"].T).reshape(len(x), -1, 16) for name in "kv")
    frequencies = config["rope_theta"] ** (-np.arange(0, 4, 2) / 4)
    query = turned(norm(both[..., :16], own["self_attn.q_norm.weight"]), frequencies)
    key = turned(norm(key, own["self_attn.k_norm.weight"]), frequencies)
    gate = sigmoid(both[..., 16:]).reshape(len(x), -1)
    return attended(query, key, value, len(x), None) * gate @ own["self_attn.o_proj.weight"].T


def delta_rule(config: dict[str, Any], own: Arrays, x: np.ndarray) -> np.ndarray:
    """Token by token. The rows of a key head: its query, its key, two values of 8 each, two z."""
    own = {name.removeprefix("linear_attn."): array for name, array in own.items()}
    rows = (x @ own["in_proj_qkvz.weight"].T).reshape(len(x), 2, 48)
    mixed = np.concatenate([rows[..., part].reshape(len(x), -1) for part in np.split(np.arange(32), [8, 16])], axis=-1)
    z = rows[..., 32:].reshape(len(x), 4, 8)
    both = (x @ own["in_proj_ba.weight"].T).reshape(len(x), 2, 4)
    beta, decay = sigmoid(both[..., :2]).reshape(len(x), 4), both[..., 2:].reshape(len(x), 4)
    decay = np.exp(-np.exp(own["A_log"]) * np.log1p(np.exp(decay + own["dt_bias"])))
    padded = np.concatenate([np.zeros((3, 64)), mixed])
    mixed = sum(padded[tap : tap + len(x)] * own["conv1d.weight"][:, 0, tap] for tap in range(4))
    mixed = mixed * sigmoid(mixed)
    query, key = (mixed[:, part : part + 16].reshape(len(x), 2, 8) for part in (0, 16))
    query, key = (each / np.sqrt(np.sum(each**2, -1, keepdims=True) + 1e-6) for each in (query, key))
    value, state, out = mixed[:, 32:].reshape(len(x), 4, 8), np.zeros((4, 8, 8)), np.zeros((len(x), 4, 8))
    for at in range(len(x)):
        for head in range(4):
            state[head] *= decay[at, head]
            missing = beta[at, head] * (value[at, head] - key[at, head // 2] @ state[head])
            state[head] += np.outer(key[at, head // 2], missing)
            out[at, head] = query[at, head // 2] @ state[head] / math.sqrt(8)
    out = out / np.sqrt(np.mean(out**2, -1, keepdims=True) + config["rms_norm_eps"]) * own["norm.weight"]
    return (out * z * sigmoid(z)).reshape(len(x), -1) @ own["out_proj.weight"].T


def qwen3_next_experts(config: dict[str, Any], own: Arrays, x: np.ndarray) -> np.ndarray:
    def dense(name: str, x: np.ndarray) -> np.ndarray:
        gate, up = (x @ own[f"mlp.{name}{part}_proj.weight"].T for part in ("gate", "up"))
        return gate * sigmoid(gate) * up @ own[f"mlp.{name}down_proj.weight"].T

    if not config["num_experts"]:
        return dense("", x)
    out = sigmoid(x @ own["mlp.shared_expert_gate.weight"].T) * dense("shared_expert.", x)
    for at, experts in routed(x @ own["mlp.gate.weight"].T, config["num_experts_per_tok"]):
        out[at] += sum(weight * dense(f"experts.{expert}.", x[at]) for expert, weight in experts)
    return out
