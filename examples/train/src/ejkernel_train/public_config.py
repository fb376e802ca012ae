"""What `config.json` of a public model says, and what it says of a model here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ejkernel_train.config import Mixer, ModelConfig
from ejkernel_train.data import START

CONFIG = "config.json"

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
"""By `model_type`."""

LAYERS: dict[str, dict[str, Mixer]] = {
    "gpt_oss": {"sliding_attention": "window_attention", "full_attention": "attention"},
    "qwen3_next": {"linear_attention": "delta_rule", "full_attention": "gated_attention"},
}
"""Of models that mix: the words of `layer_types`. Others have attention alone."""

YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}

DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "qwen3_moe": {"norm_topk_prob": False},
    "gpt_oss": {
        "attention_bias": True,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "qwen3_next": {
        "full_attention_interval": 4,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "partial_rotary_factor": 0.25,
    },
}
"""What is meant by a field that is not there, where models differ."""

OTHERWISE: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None),
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
}
"""Fields of `config.json`, and the values that the model here computes."""

READ = {"gpt_oss": ("attention_bias", "sliding_window", "quantization_config"), "qwen3_next": ("partial_rotary_factor",)}
"""Fields of these that may have other values."""

MARKS = ("bos_token_id", "eos_token_id")
"""The tokens before and after a document."""

ROTATIONS = ("default", "linear", "llama3", "yarn")
"""`rope_type`s whose angles do not depend on the length of the text."""


def model_type(config: ModelConfig) -> str:
    """Raises:
    ValueError: the model has blocks that no such files describe.
    """
    mixers = {*config.pattern}
    if mixers <= {*LAYERS["qwen3_next"].values()}:
        return "qwen3_next"
    if others := sorted(mixers - {*LAYERS["gpt_oss"].values()}):
        raise ValueError(f"the model has blocks of {', '.join(others)}; only a llama, a moe or a hybrid is exported")
    if config.sinks:
        return "gpt_oss"
    return ("qwen3_moe" if config.experts else "qwen3") if config.qk_norm else ("mixtral" if config.experts else "llama")


def fields_of(config: ModelConfig, dtype: str, length: int) -> dict[str, Any]:
    """What `config.json` says of a model.

    Raises:
        ValueError: as `model_type`, or a size that such files cannot say.
    """
    kind = model_type(config)
    said: dict[str, Any] = json.loads(config.public or "{}")
    rotation = {"rope_type": "default", "rope_theta": 10000.0, **said.get("rope_parameters", {})}
    mixture = {
        "num_experts_per_tok": config.experts_per_token,
        "num_local_experts" if kind in ("mixtral", "gpt_oss") else "num_experts": config.experts,
        "router_aux_loss_coef": config.balance,
        **({"moe_intermediate_size": config.hidden, "norm_topk_prob": True} if kind.startswith("qwen3") else {}),
    }
    fields = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "dtype": dtype,
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.epsilon,
        "tie_word_embeddings": config.tied,
        **{name: said.get(name, START) for name in MARKS},
        "attention_bias": config.attention_bias,
        "max_position_embeddings": said.get("max_position_embeddings") or length,
        "rope_parameters": rotation,
        "rope_theta": rotation["rope_theta"],  # for transformers before 5, with the next
        "rope_scaling": None if rotation["rope_type"] == "default" else rotation,
        **(mixture if config.experts else {}),
        **_own_fields(kind, config, rotation),
    }
    _check_said(config, fields)
    return fields


def _own_fields(kind: str, config: ModelConfig, rotation: dict[str, Any]) -> dict[str, Any]:
    """Those that other models do not have."""
    if kind not in LAYERS:
        return {}
    words = {mixer: word for word, mixer in LAYERS[kind].items()}
    layers = {"layer_types": [words[mixer] for mixer in config.pattern * config.repeats]}
    if kind == "gpt_oss":
        limits = {"swiglu_limit": config.swiglu_limit, "swiglu_alpha": config.swiglu_alpha}
        return {**layers, **limits, "sliding_window": config.window or None}
    return {
        **layers,
        "num_experts": config.experts,
        "shared_expert_intermediate_size": config.shared_hidden,
        "partial_rotary_factor": rotation.setdefault("partial_rotary_factor", 1.0),
        "linear_num_value_heads": config.linear_heads,
        "linear_num_key_heads": config.linear_key_heads,
        "linear_key_head_dim": config.linear_head_size,
        "linear_value_head_dim": config.linear_head_size,
        "linear_conv_kernel_dim": config.filter,
    }


def _check_said(config: ModelConfig, fields: dict[str, Any]) -> None:
    """Raises:
    ValueError: who reads the fields finds another model.
    """
    found = _config_of(fields)
    for field in dataclasses.fields(ModelConfig):
        name = field.name
        if name in ("public", "balance", "float8"):  # of no model, of training
            continue
        own, read = ((each.pattern * each.repeats if name == "pattern" else getattr(each, name)) for each in (config, found))
        if own != read:
            raise ValueError(f"the model has {name}={own!r}, and files of {fields['architectures'][0]} mean {read!r}")


def read_config(folder: Path) -> ModelConfig:
    """Raises:
    ValueError: `config.json` is missing, or has a field that the model cannot follow.
    """
    path = folder / CONFIG
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return _config_of(fields)
    except (OSError, KeyError, TypeError, ValueError) as error:
        said = f"has no {error}" if isinstance(error, KeyError) else getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: {said}") from error


def _config_of(fields: dict[str, Any]) -> ModelConfig:
    kind = fields.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type is {kind!r}; only {', '.join(ARCHITECTURES)} can be computed")
    fields = _checked(kind, fields)
    experts = fields["num_experts"] if kind == "qwen3_next" else 0
    if kind in ("mixtral", "qwen3_moe", "gpt_oss"):
        experts = fields.get("num_experts") or fields["num_local_experts"]
        if not experts:
            raise ValueError(f"num_local_experts is {experts!r}; only a number above 0 can be computed")
    return ModelConfig(
        _pattern(kind, fields),
        fields["num_hidden_layers"],
        fields["hidden_size"],
        fields["vocab_size"],
        heads=fields["num_attention_heads"],
        key_heads=fields.get("num_key_value_heads") or fields["num_attention_heads"],
        head_size=fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"],
        hidden=fields["moe_intermediate_size" if experts and kind.startswith("qwen3") else "intermediate_size"],
        experts=experts,
        experts_per_token=fields["num_experts_per_tok"] if experts else 0,
        balance=fields.get("router_aux_loss_coef", 0.001) if experts else 0.0,
        tied=fields.get("tie_word_embeddings", False),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        epsilon=fields.get("rms_norm_eps", 1e-6),
        public=_kept(kind, fields),
        **(_of_gpt_oss(fields) if kind == "gpt_oss" else _of_qwen3_next(fields) if kind == "qwen3_next" else {}),
    )


def _checked(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with what is meant where nothing is said, and windows left out that Qwen's models have and do not use.

    Raises:
        ValueError: a value that cannot be computed.
    """
    rotation = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    said = {name: rotation[name] for name in ("partial_rotary_factor",) if name in rotation}
    fields = {"norm_topk_prob": True, "sliding_window": None, **DEFAULTS.get(kind, {}), **fields, **said}
    if kind.startswith("qwen") and not fields.get("use_sliding_window"):
        fields["sliding_window"] = None
    for name, possible in OTHERWISE.items():
        if name not in READ.get(kind, ()) and (value := fields.get(name)) not in possible:
            raise ValueError(f"{name} is {value!r}; only {possible[0]!r} can be computed")
    quantized = fields.get("quantization_config")
    if quantized is not None and not (isinstance(quantized, dict) and quantized.get("quant_method") == "mxfp4"):
        raise ValueError(f"quantization_config is {quantized!r}; only quant_method 'mxfp4' can be computed")
    return fields


def _kept(kind: str, fields: dict[str, Any]) -> str:
    """For `ModelConfig.public`.

    Raises:
        ValueError: the rotation is of an unknown type.
    """
    rotation = fields.get("rope_parameters") or fields.get("rope_scaling") or (YARN if kind == "gpt_oss" else {})
    turned = rotation.get("rope_type") or rotation.get("type") or "default"
    if turned not in ROTATIONS:
        raise ValueError(f"rope_parameters has the rope_type {turned!r}; only {', '.join(ROTATIONS)} can be computed")
    parameters = {
        **{name: value for name, value in rotation.items() if name != "type"},
        "rope_type": turned,
        "rope_theta": rotation.get("rope_theta") or fields.get("rope_theta", 10000.0),
    }
    if kind == "qwen3_next":
        parameters["partial_rotary_factor"] = fields["partial_rotary_factor"]
    kept = {"rope_parameters": parameters, "max_position_embeddings": fields.get("max_position_embeddings")}
    return json.dumps(kept | {name: fields.get(name) for name in MARKS}, sort_keys=True)


def _pattern(kind: str, fields: dict[str, Any]) -> tuple[Mixer, ...]:
    """The mixers of consecutive blocks, as few as they repeat after.

    Raises:
        ValueError: a word of `layer_types` that is unknown, or too many or few of them.
    """
    words, number = LAYERS.get(kind), fields["num_hidden_layers"]
    if words is None:
        return ("attention",)
    first, last = words
    every = fields.get("full_attention_interval", 2)
    layers: Sequence[str] = fields.get("layer_types") or [first if (layer + 1) % every else last for layer in range(number)]
    if others := sorted({*layers} - {*words}):
        raise ValueError(f"layer_types has {', '.join(map(repr, others))}; only {', '.join(words)} can be computed")
    if len(layers) != number:
        raise ValueError(f"layer_types has {len(layers)} layers, and num_hidden_layers is {number}")
    mixers: tuple[Mixer, ...] = tuple(words[layer] for layer in layers)
    sizes = (size for size in range(1, number + 1) if number % size == 0)
    return mixers[: next(size for size in sizes if mixers[:size] * (number // size) == mixers)]


def _of_gpt_oss(fields: dict[str, Any]) -> dict[str, Any]:
    for name in ("swiglu_limit", "swiglu_alpha"):
        if not fields[name]:
            raise ValueError(f"{name} is {fields[name]!r}; only a number above 0 can be computed")
    windowed = "window_attention" in _pattern("gpt_oss", fields)
    if windowed and not fields["sliding_window"]:
        raise ValueError(f"sliding_window is {fields['sliding_window']!r}; layer_types with sliding_attention need a number")
    return {
        "window": fields["sliding_window"] if windowed else 0,
        "attention_bias": fields["attention_bias"],
        "sinks": True,
        "expert_bias": True,
        "swiglu_limit": fields["swiglu_limit"],
        "swiglu_alpha": fields["swiglu_alpha"],
    }


def _of_qwen3_next(fields: dict[str, Any]) -> dict[str, Any]:
    key, value = fields["linear_key_head_dim"], fields["linear_value_head_dim"]
    if key != value:
        raise ValueError(f"linear_key_head_dim is {key} and linear_value_head_dim {value}; only one size can be computed")
    return {
        "shared_hidden": fields["shared_expert_intermediate_size"] if fields["num_experts"] else 0,
        "linear_heads": fields["linear_num_value_heads"],
        "linear_key_heads": fields["linear_num_key_heads"],
        "linear_head_size": value,
        "filter": fields["linear_conv_kernel_dim"],
    }
