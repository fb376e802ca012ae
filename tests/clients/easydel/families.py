"""Tiny models of the families that are run: two to four layers of a few dozen channels, float32, and a batch with padding."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY = 64
LENGTH = 16

_DENSE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: its classes' prefix in EasyDeL and the fields of its config."""

    prefix: str
    fields: dict[str, Any]
    attention: bool = True


FAMILIES = {
    "llama": Family("Llama", _DENSE),
    "qwen2": Family("Qwen2", {**{k: v for k, v in _DENSE.items() if k != "head_dim"}, "use_sliding_window": False}),
    "qwen3": Family("Qwen3", _DENSE),
    "mistral": Family("Mistral", {**_DENSE, "sliding_window": 5}),
    "gemma2": Family(
        "Gemma2",
        {**_DENSE, "query_pre_attn_scalar": 16, "sliding_window": 5, "attn_logit_softcapping": 2.0},
    ),
    "mixtral": Family("Mixtral", {**_DENSE, **_EXPERTS, "sliding_window": None}),
    "qwen3_moe": Family("Qwen3Moe", {**_DENSE, **_QWEN_EXPERTS}),
    "gpt_oss": Family("GptOss", {**_DENSE, **_EXPERTS, "sliding_window": 5}),
    "mamba": Family(
        "Mamba",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 4},
        attention=False,
    ),
    "mamba2": Family(
        "Mamba2",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "state_size": 8,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
        },
        attention=False,
    ),
    "qwen3_next": Family(
        "Qwen3Next",
        {
            **_DENSE,
            **_QWEN_EXPERTS,
            "shared_expert_intermediate_size": 24,
            "full_attention_interval": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
}


def build(name: str, mechanism: str, axes: tuple[int, ...] | None = None, **fields: Any) -> Any:
    """A model of a family with random parameters, the same for every mechanism.

    Args:
        name: of the family.
        mechanism: EasyDeL's name of the attention mechanism.
        axes: devices along `dp, fsdp, ep, tp, sp`, all that there are; None splits the batch.
        **fields: further fields of the config.
    """
    import easydel as ed
    from flax import nnx

    family = FAMILIES[name]
    config = getattr(ed, f"{family.prefix}Config")(
        **{
            **family.fields,
            "attn_mechanism": mechanism,
            "attn_dtype": jnp.float32,
            "attn_softmax_dtype": jnp.float32,
            "kvdtype": jnp.float32,
            "blocksize_q": 8,
            "blocksize_k": 8,
            "sharding_axis_dims": axes or (jax.device_count(), 1, 1, 1, 1),
            **fields,
        }
    )
    model_class = getattr(ed, f"{family.prefix}ForCausalLM")
    with on_mesh(config.mesh):
        model = model_class(config=config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
        parameters = nnx.state(model, nnx.Param)
        leaves, tree = jax.tree.flatten(parameters)
        noise = np.random.default_rng(0)
        # so that what starts at 0 or 1 (norms, biases, sinks) is as general as the rest
        moved = [leaf + jnp.asarray(0.2 * noise.standard_normal(leaf.shape), leaf.dtype) for leaf in leaves]
        nnx.update(model, jax.tree.unflatten(tree, moved))
    return model


def batch() -> tuple[Any, Any]:
    """Token ids and an attention mask; every second row ends in padding."""
    ids = np.random.default_rng(1).integers(3, VOCABULARY, (4, LENGTH))
    mask = np.ones((4, LENGTH), np.int32)
    mask[1::2, LENGTH - 4 :] = 0
    return jnp.asarray(ids), jnp.asarray(mask)


@contextlib.contextmanager
def on_mesh(mesh: Any) -> Generator[None]:
    """EasyDeL finds its mesh in the older context of JAX, whose deprecation is not ours to act upon."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh:
            yield
