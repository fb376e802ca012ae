"""Public models' files, both ways: against a forward pass in NumPy that knows the files alone, and against what was written."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from public_kinds import ours

from ejkernel_train import __main__ as command, export, public
from ejkernel_train.config import MODELS, TrainConfig
from ejkernel_train.data import Packed
from ejkernel_train.model import Model, restacked
from ejkernel_train.operations import choose
from ejkernel_train.resume import model_of
from ejkernel_train.step import initialise

save_file = pytest.importorskip("safetensors.numpy", reason="runs where safetensors is installed").save_file

BASE: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
MIXTURE = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 1e4, "tie_word_embeddings": True},
    "llama3": {"model_type": "llama", "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    "linear": {"model_type": "llama", "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}, "head_dim": 16},
    "qwen3": {"model_type": "qwen3", "rope_theta": 1e6, "head_dim": 16, "tie_word_embeddings": True, "sliding_window": 9},
    "mixtral": {"model_type": "mixtral", "rope_theta": 1e6, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", "rope_theta": 1e6, "head_dim": 16, **MIXTURE},
}


def arrays(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random ones, by the names that public files have."""
    kind, d, heads, shared = config["model_type"], config["hidden_size"], 4, 2
    size, random = config.get("head_dim") or d // heads, np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (264, d), "model.norm.weight": (d,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (264, d)
    for layer in range(3):
        block: dict[str, tuple[int, ...]] = {"input_layernorm": (d,), "post_attention_layernorm": (d,)}
        block |= {"self_attn.q_proj": (heads * size, d), "self_attn.o_proj": (d, heads * size)}
        block |= {"self_attn.k_proj": (shared * size, d), "self_attn.v_proj": (shared * size, d)}
        if kind.startswith("qwen3"):
            block |= {"self_attn.q_norm": (size,), "self_attn.k_norm": (size,)}
        hidden = config["moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"]
        router, gate, up, down = MLP[kind]
        block |= {router: (4, d)} if router else {}
        for expert in range(4 if router else 1):
            block |= {gate.format(expert): (hidden, d), up.format(expert): (hidden, d), down.format(expert): (d, hidden)}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    return {
        name: (random.normal(size=shape) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


DENSE = ("", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
OF_QWEN = ("mlp.gate", *(f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")))
OF_MIXTRAL = ("block_sparse_moe.gate", *(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2")))
MLP = {"llama": DENSE, "qwen3": DENSE, "mixtral": OF_MIXTRAL, "qwen3_moe": OF_QWEN}


def frequencies(config: dict[str, Any], size: int) -> np.ndarray:
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    plain = (said.get("rope_theta") or config["rope_theta"]) ** (-np.arange(0, size, 2) / size)
    if said.get("type") == "linear":
        return plain / said["factor"]
    if said.get("rope_type") == "llama3":
        turns = said["original_max_position_embeddings"] * plain / (2 * math.pi)
        low, high = said["low_freq_factor"], said["high_freq_factor"]
        share = np.clip((turns - low) / (high - low), 0, 1)
        return share * plain + (1 - share) * plain / said["factor"]
    return plain


def logits(config: dict[str, Any], files: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """In float64, of one text."""
    weights = {name: array.astype(np.float64) for name, array in files.items()}
    size, length = config.get("head_dim") or config["hidden_size"] // 4, len(tokens)
    angles = np.arange(length)[:, None] * frequencies(config, size)
    cos, sin = np.cos(angles), np.sin(angles)

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config["rms_norm_eps"]) * scale

    def turn(x: np.ndarray) -> np.ndarray:  # [H, T, D]
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def silu(x: np.ndarray) -> np.ndarray:
        return x / (1 + np.exp(-x))

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(3):
        own = {
            name.split(".", 3)[3][:-7]: value for name, value in weights.items() if name.startswith(f"model.layers.{layer}.")
        }
        normed = norm(x, own["input_layernorm"])
        query, key, value = (
            (normed @ own[f"self_attn.{name}_proj"].T).reshape(length, -1, size).swapaxes(0, 1) for name in "qkv"
        )
        if "self_attn.q_norm" in own:
            query, key = norm(query, own["self_attn.q_norm"]), norm(key, own["self_attn.k_norm"])
        query, key, value = turn(query), np.repeat(turn(key), 2, 0), np.repeat(value, 2, 0)
        scores = np.where(np.tri(length, dtype=bool), query @ key.swapaxes(1, 2) / math.sqrt(size), -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True) @ value).swapaxes(0, 1).reshape(length, -1)
        x = x + mixed @ own["self_attn.o_proj"].T
        normed = norm(x, own["post_attention_layernorm"])
        router, *names = MLP[config["model_type"]]
        shares = np.ones((length, 1))
        if router:
            likely = np.exp(normed @ own[router].T)
            shares = np.where(likely >= np.sort(likely)[:, [-2]], likely, 0)
            shares = shares / shares.sum(-1, keepdims=True)
        for expert in range(shares.shape[1]):
            gate, up, down = (own[name.format(expert)].T for name in names)
            x = x + shares[:, [expert]] * (silu(normed @ gate) * (normed @ up) @ down)
    return norm(x, weights["model.norm.weight"]) @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T


def write(folder: Path, name: str, **changed: Any) -> dict[str, Any]:
    config = {**BASE, **CASES[name], **changed}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(arrays(config), folder / "model.safetensors")
    return config


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_read_and_written(name: str, tmp_path: Path):
    config, tokens = write(tmp_path, name), np.arange(40, dtype=np.int32) * 7 % 264
    model, files = public.load(tmp_path), arrays(config)
    wanted = logits(config, files, tokens)
    np.testing.assert_allclose(ours(model, tokens, "plain"), wanted, rtol=0, atol=1e-4)
    if name in ("llama3", "qwen3"):
        np.testing.assert_allclose(ours(model, tokens, "ejkernel"), wanted, rtol=0, atol=1e-4)
    written = dict(public.tensors(model))
    assert written.keys() == files.keys()
    for each, array in files.items():
        np.testing.assert_array_equal(written[each], array)
    public.save(model, tmp_path / "out", "float32")
    again = public.load(tmp_path / "out")
    assert again.config == model.config
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(model)))


def test_several_files_and_bfloat16(tmp_path: Path):
    write(tmp_path, "llama", eos_token_id=[1, 2])
    model = public.load(tmp_path)
    files = public.save(model, tmp_path / "out", "bfloat16", most_bytes=30_000)
    assert len(files) > 2 and all(file.stat().st_size < 35_000 for file in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * sum(leaf.size for leaf in jax.tree.leaves(model))
    assert {*index["weight_map"].values()} == {file.name for file in files}
    again = public.load(tmp_path / "out", "bfloat16")
    for found, right in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(found.astype(jnp.float32), right.astype(jnp.bfloat16).astype(jnp.float32))
    assert again.embedding.dtype == jnp.bfloat16 and again.norm.dtype == jnp.float32
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (said["dtype"], said["bos_token_id"], said["eos_token_id"]) == ("bfloat16", None, [1, 2])


def test_scales_of_float8_are_those_of_the_weights(tmp_path: Path):
    write(tmp_path, "llama")
    gate = public.load(tmp_path, float8=True).blocks[0].feed_forward.gate
    np.testing.assert_allclose(gate.scales[:, 1], jnp.max(jnp.abs(gate.weight), axis=(1, 2)) / 448, rtol=1e-6)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_type": "gemma3_text"}, "model_type is 'gemma3_text'"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"attention_bias": True}, "attention_bias is True; only False can be computed"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"sliding_window": 128}, "sliding_window is 128"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config is"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"hidden_size": None}, "config.json: "),
        ({"intermediate_size": 40}, "mlp.gate_proj.weight is [48, 32], and config.json makes it [40, 32]"),
        ({"num_hidden_layers": 4}, "has no model.layers.3.input_layernorm.weight"),
        ({"num_hidden_layers": 2}, "has model.layers.2.input_layernorm.weight,"),
    ],
    ids=str,
)
def test_what_cannot_be_computed_is_refused_by_its_name(changed: dict[str, Any], said: str, tmp_path: Path):
    write(tmp_path, "llama")
    (tmp_path / "config.json").write_text(json.dumps({**BASE, **CASES["llama"], **changed}))
    with pytest.raises(ValueError, match=re.escape(said)):
        public.load(tmp_path)


def test_a_model_is_trained_further_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "public").mkdir()
    write(tmp_path / "public", "llama3")
    (tmp_path / "a.jsonl").write_text('{"tokens": [1, 2, 3, 4, 5, 6, 7, 8]}\n' * 8)
    asked = ["--from", str(tmp_path / "public"), "--data", str(tmp_path / "a.jsonl"), "--checkpoints", str(tmp_path / "run")]
    small = ["--batch", "2", "--length", "16", "--dtype", "float32", "--kernels", "plain", "--warmup", "0"]
    record = tmp_path / "record.json"
    assert command.main([*asked, *small, "--steps", "5", "--layers", "unroll", "--out", str(record)]) == 0
    losses = json.loads(record.read_text())["builds"][0]["losses"]
    exact = public.load(tmp_path / "public").losses(
        Packed(jnp.arange(1, 8)[None], jnp.arange(2, 9)[None]), choose("plain"), "float32"
    )[0]
    assert losses[0] == pytest.approx(float(exact), abs=1e-4) and losses[-1] < losses[0]
    assert export.main(["--checkpoint", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--dtype", "float32"]) == 0
    exported, trained = public.load(tmp_path / "out"), model_of(tmp_path / "run")
    assert exported.config == trained.config
    assert all(map(np.array_equal, jax.tree.leaves(exported), jax.tree.leaves(trained)))
    assert "model.safetensors: " in capsys.readouterr().out
    assert export.main(["--checkpoint", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]) == 2
    (tmp_path / "b.txt").write_text("text")
    for wrong, said in (
        (["--data", str(tmp_path / "b.txt")], "it is text, and the model has no tokenizer.json"),
        (["--text", str(tmp_path / "b.txt")], "--from is of a model with its own tokens; give documents with --data"),
        (["--data", str(tmp_path / "a.jsonl"), "--repeats", "2"], "leave out either it or --repeats"),
    ):
        assert command.main(["--from", str(tmp_path / "public"), *wrong]) == 2
        assert said in capsys.readouterr().err


def test_all_but_the_state_space_is_exported(tmp_path: Path):
    model = initialise(TrainConfig(model="mamba2")).model
    with pytest.raises(ValueError, match="the model has blocks of state_space; only a llama, a moe or a hybrid is exported"):
        public.save(model, tmp_path)
    sized = Model(dataclasses.replace(MODELS["llama"]["tiny"], attention_bias=True), jax.random.key(0))
    with pytest.raises(ValueError, match="attention_bias is True; only False can be computed"):
        public.save(sized, tmp_path)
    for name in ("llama", "moe", "hybrid"):
        model = initialise(TrainConfig(model=name, layers="unroll")).model
        public.save(model, tmp_path / name, "float32")
        found = public.load(tmp_path / name)
        assert dataclasses.replace(found.config, public="", balance=0) == dataclasses.replace(model.config, balance=0)
        assert json.loads((tmp_path / name / "config.json").read_text())["eos_token_id"] == 256
        assert all(map(np.array_equal, jax.tree.leaves(restacked(found, False)), jax.tree.leaves(model)))


def test_text_by_the_model_s_own_tokenizer(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers", reason="runs where tokenizers is installed")
    write(tmp_path, "llama", eos_token_id=[1, 2])
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<s>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert public.encoding(tmp_path) is None
    words.save(str(tmp_path / "tokenizer.json"))
    found = public.encoding(tmp_path)
    assert found is not None and (found.start, found.end, list(found.encode("a b"))) == ((0,), (1,), [2, 3])
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: "):
        public.encoding(tmp_path)
