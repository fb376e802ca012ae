"""Models in the files that Hugging Face's `transformers` reads and writes: `config.json` and `.safetensors`, both ways.

Llama and Mistral, Qwen3, Mixtral and Qwen3's mixture. What these files can say and this package's model cannot compute is refused,
by the name of the field. Needs `pip install ejkernel-train[public]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_train.config import ModelConfig
from ejkernel_train.data import START, Encoding
from ejkernel_train.float8 import initial_scales
from ejkernel_train.model import Block, Model, restacked

WEIGHTS, INDEX, CONFIG, TOKENIZER = "model.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json"

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""By `model_type`."""

NAMES = {
    ".mixer_norm": "input_layernorm.weight",
    ".feed_forward_norm": "post_attention_layernorm.weight",
    ".mixer.query.weight": "self_attn.q_proj.weight",
    ".mixer.key.weight": "self_attn.k_proj.weight",
    ".mixer.value.weight": "self_attn.v_proj.weight",
    ".mixer.output.weight": "self_attn.o_proj.weight",
    ".mixer.query_scale": "self_attn.q_norm.weight",
    ".mixer.key_scale": "self_attn.k_norm.weight",
    ".feed_forward.gate.weight": "mlp.gate_proj.weight",
    ".feed_forward.up.weight": "mlp.up_proj.weight",
    ".feed_forward.down.weight": "mlp.down_proj.weight",
}
"""Of a block's parameters. Matrices lie the other way round in files, `[outputs, inputs]`."""

EXPERTS = {
    "mixtral": {
        ".feed_forward.router.weight": "block_sparse_moe.gate.weight",
        ".feed_forward.gate": "block_sparse_moe.experts.{}.w1.weight",
        ".feed_forward.up": "block_sparse_moe.experts.{}.w3.weight",
        ".feed_forward.down": "block_sparse_moe.experts.{}.w2.weight",
    },
    "qwen3_moe": {
        ".feed_forward.router.weight": "mlp.gate.weight",
        ".feed_forward.gate": "mlp.experts.{}.gate_proj.weight",
        ".feed_forward.up": "mlp.experts.{}.up_proj.weight",
        ".feed_forward.down": "mlp.experts.{}.down_proj.weight",
    },
}
"""Of mixtures, where every expert is an array of its own."""

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

MARKS = ("bos_token_id", "eos_token_id")
"""The tokens before and after a document."""

ROTATIONS = ("default", "linear", "llama3", "yarn")
"""`rope_type`s whose angles do not depend on the length of the text."""


def model_type(config: ModelConfig) -> str:
    """Raises:
    ValueError: the model has blocks that no such files describe.
    """
    if others := sorted({*config.pattern} - {"attention"}):
        raise ValueError(f"the model has blocks of {', '.join(others)}; only a llama or a moe is exported")
    return ("qwen3_moe" if config.experts else "qwen3") if config.qk_norm else ("mixtral" if config.experts else "llama")


def fields_of(config: ModelConfig, dtype: str, length: int) -> dict[str, Any]:
    """What `config.json` says of a model."""
    kind = model_type(config)
    said: dict[str, Any] = json.loads(config.public or "{}")
    rotation = {"rope_type": "default", "rope_theta": 10000.0, **said.get("rope_parameters", {})}
    mixture = {
        "num_experts_per_tok": config.experts_per_token,
        "num_local_experts" if kind == "mixtral" else "num_experts": config.experts,
        "router_aux_loss_coef": config.balance,
        **({"moe_intermediate_size": config.hidden, "norm_topk_prob": True} if kind == "qwen3_moe" else {}),
    }
    return {
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
        "attention_bias": False,
        "max_position_embeddings": said.get("max_position_embeddings") or length,
        "rope_parameters": rotation,
        "rope_theta": rotation["rope_theta"],  # for transformers before 5, with the next
        "rope_scaling": None if rotation["rope_type"] == "default" else rotation,
        **(mixture if config.experts else {}),
    }


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
    # what is meant where it is not said, and windows that Qwen's models have and do not use
    fields = {"norm_topk_prob": kind != "qwen3_moe", "sliding_window": 4096 if kind == "mistral" else None, **fields}
    if kind.startswith("qwen") and not fields.get("use_sliding_window"):
        fields["sliding_window"] = None
    for name, possible in OTHERWISE.items():
        if (value := fields.get(name)) not in possible:
            raise ValueError(f"{name} is {value!r}; only {possible[0]!r} can be computed")
    rotation = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    turned = rotation.get("rope_type") or rotation.get("type") or "default"
    if turned not in ROTATIONS:
        raise ValueError(f"rope_parameters has the rope_type {turned!r}; only {', '.join(ROTATIONS)} can be computed")
    said = {"rope_theta": 10000.0, "rope_parameters": rotation, "max_position_embeddings": None, **fields}
    base = rotation.get("rope_theta") or said["rope_theta"]
    parameters = {
        **{name: value for name, value in rotation.items() if name != "type"},
        "rope_type": turned,
        "rope_theta": base,
    }
    kept = {"rope_parameters": parameters, "max_position_embeddings": said["max_position_embeddings"]}
    kept |= {name: fields.get(name) for name in MARKS}
    experts = (fields.get("num_experts") or fields["num_local_experts"]) if kind in EXPERTS else 0
    return ModelConfig(
        ("attention",),
        fields["num_hidden_layers"],
        fields["hidden_size"],
        fields["vocab_size"],
        heads=fields["num_attention_heads"],
        key_heads=fields.get("num_key_value_heads") or fields["num_attention_heads"],
        head_size=fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"],
        hidden=fields["moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"],
        experts=experts,
        experts_per_token=fields["num_experts_per_tok"] if experts else 0,
        balance=fields.get("router_aux_loss_coef", 0.001) if experts else 0.0,
        tied=fields.get("tie_word_embeddings", False),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        epsilon=fields.get("rms_norm_eps", 1e-6),
        public=json.dumps(kept, sort_keys=True),
    )


def _names(config: ModelConfig) -> dict[str, str]:
    return {**NAMES, **EXPERTS.get(model_type(config), {})}


def _outer(model: Any) -> dict[str, Any]:
    """What is not of blocks; a head that is the embedding is in no file."""
    found = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm}
    return found if model.head is None else {**found, "lm_head.weight": model.head}


def load(folder: Path, dtype: str = "float32", *, float8: bool = False) -> Model:
    """The model of a folder, its blocks stacked: matrices in `dtype`, vectors in float32.

    Raises:
        ValueError: as `read_config`, or an array is missing, has another shape, or is none of the model's.
    """
    config = read_config(folder)
    shapes: Any = jax.eval_shape(lambda: Model(config, jax.random.key(0), stacked=False))
    read, names = _Files(folder), _names(config)

    def array(name: str, shape: tuple[int, ...], turned: bool) -> jax.Array:
        found = read.tensor(name, shape[::-1] if turned else shape)
        return jnp.asarray(found.T if turned else found, dtype if len(shape) > 1 else jnp.float32)

    def of_block(layer: int, block: Block) -> Block:
        def leaf(path: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
            name = f"model.layers.{layer}.{names[jax.tree_util.keystr(path)]}"
            if like.ndim < 3:
                return array(name, like.shape, like.ndim == 2)
            return jnp.stack([array(name.format(expert), like.shape[1:], True) for expert in range(like.shape[0])])

        return jax.tree_util.tree_map_with_path(leaf, block)

    outer = {name: array(name, like.shape, False) for name, like in _outer(shapes).items()}
    blocks = tuple(of_block(layer, block) for layer, block in enumerate(shapes.blocks))
    read.check_all_read(config.tied)
    parts = outer["model.embed_tokens.weight"], blocks, outer["model.norm.weight"], outer.get("lm_head.weight")
    model = eqx.tree_at(Model.parts, shapes, parts, is_leaf=lambda part: part is None)
    return _with_scales(restacked(model, True)) if float8 else restacked(model, True)


def _with_scales(model: Model) -> Model:
    """With the scales of float8 that a model of these weights begins with."""
    import dataclasses

    shapes: Any = jax.eval_shape(lambda: Model(dataclasses.replace(model.config, float8=True), jax.random.key(0)))
    weights = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(model)}

    def leaf(path: Any, _: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        known = weights.get(name)
        return jax.vmap(initial_scales)(weights[name.removesuffix("scales") + "weight"]) if known is None else known

    return jax.tree_util.tree_map_with_path(leaf, shapes)


class _Files:
    """The arrays of a folder by name, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            if (folder / INDEX).is_file():
                files = sorted({*json.loads((folder / INDEX).read_text())["weight_map"].values()})
            else:
                files = [WEIGHTS]
            opened = [safe_open(folder / file, "np") for file in files]
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise ValueError(f"{folder} cannot be read: {error}") from error
        self._folder = folder
        self._files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 no mapping
        self._left = {*self._files}

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in self._files:
            raise ValueError(f"{self._folder} has no {name}")
        found = self._files[name].get_tensor(name)
        if found.shape != shape:
            raise ValueError(f"{self._folder}: {name} is {list(found.shape)}, and {CONFIG} makes it {list(shape)}")
        self._left.discard(name)
        return found

    def check_all_read(self, tied: bool) -> None:
        known = ("rotary_emb.inv_freq", *(("lm_head.weight",) if tied else ()))
        if others := sorted(name for name in self._left if not name.endswith(known)):
            raise ValueError(f"{self._folder} has {', '.join(others[:3])}, which the model of {CONFIG} has no place for")


def tensors(model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """A model's arrays as files have them."""
    config = model.config
    names, size = _names(config), len(config.pattern)
    yield from ((name, np.asarray(array)) for name, array in _outer(model).items())
    for layer in range(config.layers):
        block = model.blocks[layer % size if model.stacked else layer]
        for path, leaf in jax.tree_util.tree_leaves_with_path(block):
            if (own := jax.tree_util.keystr(path)).endswith(".scales"):
                continue
            array = np.asarray(leaf[layer // size] if model.stacked else leaf)
            name = f"model.layers.{layer}.{names[own]}"
            if array.ndim == 3:
                yield from ((name.format(expert), each.T) for expert, each in enumerate(array))
            else:
                yield name, array.T


def save(model: Model, folder: Path, dtype: str = "bfloat16", *, length: int = 2048, most_bytes: int = 5 * 10**9) -> list[Path]:
    """Write `config.json` and the arrays, in several files with an index if they are more than `most_bytes`. Returns the files.

    Raises:
        ValueError: as `model_type`.
    """
    from safetensors.numpy import save_file

    fields = fields_of(model.config, dtype, length)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
    files: list[dict[str, str]] = []  # names of arrays, of each file
    held: dict[str, np.ndarray] = {}
    total = 0

    def write() -> None:
        save_file(held, folder / f"model-{len(files) + 1:05}.safetensors", metadata={"format": "pt"})
        files.append(dict.fromkeys(held, ""))
        held.clear()

    for name, array in tensors(model):
        narrow = np.ascontiguousarray(array, dtype=jnp.dtype(dtype))
        if held and sum(each.nbytes for each in held.values()) + narrow.nbytes > most_bytes:
            write()
        held[name], total = narrow, total + narrow.nbytes
    write()
    if len(files) == 1:
        return [(folder / "model-00001.safetensors").replace(folder / WEIGHTS)]
    paths: list[Path] = []
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        final = f"model-{number:05}-of-{len(files):05}.safetensors"
        paths.append((folder / f"model-{number:05}.safetensors").replace(folder / final))
        weight_map |= dict.fromkeys(names, final)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")
    return paths


def encoding(folder: Path) -> Encoding | None:
    """Of the folder's `tokenizer.json`, None if it has none. Documents end with the model's `eos_token_id`.

    Raises:
        ValueError: the file cannot be read, or the package `tokenizers` is missing.
    """
    if not (folder / TOKENIZER).is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError(f"{folder / TOKENIZER}: {error}; pip install ejkernel-train[public]") from None
    try:
        tokenizer: Any = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:
        raise ValueError(f"{folder / TOKENIZER}: {error}") from error
    end = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("eos_token_id")
    ends = tuple(end[:1] if isinstance(end, list) else [] if end is None else [end])
    return Encoding(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, tuple(tokenizer.encode("").ids), ends)
