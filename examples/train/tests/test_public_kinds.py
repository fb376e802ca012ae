"""Public models shaped like gpt-oss and like Qwen3-Next: against a forward pass that knows the files alone, and both ways."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from public_kinds import GPT_OSS, KINDS, QWEN3_NEXT, Arrays, arrays, logits, ours, write

from ejkernel_train import public
from ejkernel_train.data import Packed
from ejkernel_train.model import Model
from ejkernel_train.operations import choose

TOKENS = np.arange(40, dtype=np.int32) * 7 % 264


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_is_read_and_written(name: str, tmp_path: Path):
    config = KINDS[name]
    files = arrays(config)
    write(tmp_path, config, files)
    model, wanted = public.load(tmp_path), logits(config, files, TOKENS)
    for kernels in ("plain", "ejkernel"):
        np.testing.assert_allclose(ours(model, TOKENS, kernels), wanted, rtol=0, atol=1e-4)
    written = dict(public.tensors(model))
    assert written.keys() == files.keys()
    for each, array in files.items():
        np.testing.assert_allclose(written[each], array, rtol=0, atol=1e-7, err_msg=each)  # of norms 1 + w - 1
    public.save(model, tmp_path / "out", "float32")
    again = public.load(tmp_path / "out")
    assert again.config == model.config
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(model)))


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next"])
def test_packed_documents_and_gradients(name: str, tmp_path: Path):
    """Of two texts in a row and alone; the same gradients by both builds."""
    write(tmp_path, KINDS[name], arrays(KINDS[name]))
    model = public.load(tmp_path)
    tokens, documents = jnp.asarray(TOKENS)[None], jnp.asarray([0] * 24 + [1] * 16)[None]
    labels = jnp.roll(tokens, -1, axis=1)
    apart = [Packed(tokens[:, part], labels[:, part], documents[:, part]) for part in (slice(24), slice(24, None))]
    together = Packed(tokens, labels, documents)

    def loss(model: Model, rows: Packed, kernels: str) -> jax.Array:
        return model.losses(rows, choose(kernels), "float32")[0]

    found: dict[str, Any] = {}
    for kernels in ("plain", "ejkernel"):
        value, found[kernels] = jax.value_and_grad(loss)(model, together, kernels)
        alone = sum(len(rows.tokens[0]) * float(loss(model, rows, kernels)) for rows in apart) / 40
        assert float(value) == pytest.approx(alone, abs=2e-5)
    for (path, plain), fast in zip(
        jax.tree_util.tree_leaves_with_path(found["plain"]), jax.tree.leaves(found["ejkernel"]), strict=True
    ):
        most = float(jnp.max(jnp.abs(plain)))
        assert most > 0, jax.tree_util.keystr(path)
        np.testing.assert_allclose(fast, plain, rtol=0, atol=1e-3 * most, err_msg=jax.tree_util.keystr(path))


def quantized(random: np.random.Generator, experts: int, inputs: int, outputs: int) -> tuple[Arrays, np.ndarray]:
    """Arrays of MXFP4, and their numbers one by one."""
    blocks = random.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
    scales = random.integers(122, 126, (experts, outputs, inputs // 32), dtype=np.uint8)
    of_bits = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    numbers = np.zeros((experts, inputs, outputs), np.float32)
    for at in np.ndindex(numbers.shape):
        expert, place, row = at
        byte = int(blocks[expert, row, place // 32, place % 32 // 2])
        bits = byte >> 4 if place % 2 else byte & 15
        sign = -1 if bits & 8 else 1
        numbers[at] = sign * of_bits[bits & 7] * 2.0 ** (int(scales[expert, row, place // 32]) - 127)
    return {"blocks": blocks, "scales": scales}, numbers


def test_mxfp4(tmp_path: Path):
    config = {**GPT_OSS, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    files, random = arrays(config), np.random.default_rng(1)
    wide = dict(files)
    for name in [name for name in files if name.endswith(("gate_up_proj", "down_proj"))]:
        packed, wide[name] = quantized(random, *files.pop(name).shape)
        files |= {f"{name}_{part}": array for part, array in packed.items()}
    write(tmp_path, config, files)
    model = public.load(tmp_path)
    for name, array in public.tensors(model):
        np.testing.assert_array_equal(array, wide[name], err_msg=name)
    np.testing.assert_allclose(ours(model, TOKENS, "plain"), logits(config, wide, TOKENS), rtol=0, atol=1e-4)
    narrow = public.load(tmp_path, "bfloat16").blocks[0].feed_forward.up
    np.testing.assert_array_equal(narrow.astype(jnp.float32), model.blocks[0].feed_forward.up)
    files[f"{name}"] = np.zeros(1, np.float32)  # the last of all
    del files["model.layers.1.mlp.experts.down_proj_scales"]
    write(tmp_path, config, files)
    with pytest.raises(ValueError, match=r"has no model\.layers\.1\.mlp\.experts\.down_proj_scales"):
        public.load(tmp_path)


def test_what_is_not_said_is_the_kind_s_default(tmp_path: Path):
    meant = {
        "gpt_oss": (
            "attention_bias",
            "layer_types",
            "head_dim",
            "rms_norm_eps",
            "sliding_window",
            "rope_theta",
            "rope_scaling",
        ),
        "qwen3_next": ("head_dim", "full_attention_interval", "linear_conv_kernel_dim", "partial_rotary_factor"),
    }
    found = {}
    for name, fields in meant.items():
        (tmp_path / "config.json").write_text(
            json.dumps({k: v for k, v in KINDS[name].items() if k not in fields} | {"num_hidden_layers": 4})
        )
        found[name] = public.read_config(tmp_path)
    oss, following = found["gpt_oss"], found["qwen3_next"]
    assert (oss.pattern, oss.head_size, oss.window, oss.epsilon) == (("window_attention", "attention"), 64, 128, 1e-5)
    assert oss.attention_bias and oss.sinks and oss.expert_bias and (oss.swiglu_limit, oss.swiglu_alpha) == (7.0, 1.702)
    rotation = json.loads(oss.public)["rope_parameters"]
    assert rotation == {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    assert following.pattern == ("delta_rule",) * 3 + ("gated_attention",) and (following.head_size, following.filter) == (
        256,
        4,
    )
    assert json.loads(following.public)["rope_parameters"]["partial_rotary_factor"] == 0.25


def test_layers_that_do_not_repeat(tmp_path: Path):
    layers = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    config = {**GPT_OSS, "layer_types": layers}
    files = arrays(config)
    write(tmp_path, config, files)
    model = public.load(tmp_path)
    assert model.config.pattern == ("attention", "window_attention", "window_attention", "attention")
    np.testing.assert_allclose(ours(model, TOKENS, "plain"), logits(config, files, TOKENS), rtol=0, atol=1e-4)
    whole = {**GPT_OSS, "layer_types": ["full_attention"] * 4, "sliding_window": None}
    write(tmp_path, whole, files)
    assert public.read_config(tmp_path).pattern == ("attention",) and public.read_config(tmp_path).window == 0


def test_layers_of_predictions_further_ahead_are_left_out(tmp_path: Path):
    files = arrays(QWEN3_NEXT)
    write(tmp_path, QWEN3_NEXT, {**files, "mtp.fc.weight": np.zeros((2, 2), np.float32)})
    found = ours(public.load(tmp_path), TOKENS, "plain")
    np.testing.assert_allclose(found, logits(QWEN3_NEXT, files, TOKENS), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("gpt_oss", {"layer_types": ["full_attention", "chunked_attention"] * 2}, "layer_types has 'chunked_attention'; only"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types has 1 layers, and num_hidden_layers is 4"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window is None; layer_types with sliding_attention need a number"),
        ("gpt_oss", {"swiglu_limit": None}, "swiglu_limit is None; only a number above 0"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "only quant_method 'mxfp4' can be computed"),
        ("gpt_oss", {"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ("gpt_oss", {"attention_bias": False}, "has model.layers.0.self_attn.k_proj.bias,"),
        ("gpt_oss", {"num_local_experts": None}, "num_local_experts is None; only a number above 0"),
        ("gpt_oss", {"intermediate_size": 48}, "gate_up_proj is [4, 32, 64], and config.json makes it [4, 32, 96]"),
        ("qwen3_next", {"linear_key_head_dim": 16}, "linear_key_head_dim is 16 and linear_value_head_dim 8; only one size"),
        ("qwen3_next", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("qwen3_next", {"mlp_only_layers": [1]}, "mlp_only_layers is [1]"),
        ("qwen3_next", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3_next", {"full_attention_interval": 2}, "has no model.layers.1.self_attn."),
        ("qwen3_next", {"num_experts": 8}, "has no model.layers.0.mlp.experts.4.gate_proj.weight"),
        ("qwen3_next", {"num_hidden_layers": 2}, "has model.layers.2."),
        ("qwen3_next", {"linear_num_key_heads": 4}, "in_proj_qkvz.weight is [96, 32], and config.json makes it [128, 32]"),
    ],
    ids=str,
)
def test_what_cannot_be_computed_is_refused_by_its_name(name: str, changed: dict[str, Any], said: str, tmp_path: Path):
    write(tmp_path, {**KINDS[name], **changed}, arrays(KINDS[name]))
    with pytest.raises(ValueError, match=re.escape(said)):
        public.load(tmp_path)


def test_what_files_cannot_say_is_not_exported(tmp_path: Path):
    write(tmp_path, GPT_OSS, arrays(GPT_OSS))
    config = dataclasses.replace(public.read_config(tmp_path), qk_norm=True)
    with pytest.raises(ValueError, match="the model has qk_norm=True, and files of GptOssForCausalLM mean False"):
        public.save(Model(config, jax.random.key(0)), tmp_path / "out")
