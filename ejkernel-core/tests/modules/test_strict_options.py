"""Options of models' layers under JAX's own strictness: no rank or dtype is promoted implicitly, in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ejkernel

Q = jnp.ones((1, 6, 4, 8), jnp.bfloat16)
X, ROW, EIGHT, FOUR = Q[:, :, 0], jnp.ones(32, jnp.bfloat16), jnp.ones(8, jnp.bfloat16), jnp.ones(4, jnp.bfloat16)
BOUNDS, IDS = jnp.array([0, 3, 5]), jnp.array([[0, 0, 1, 1, 1, -1]])
NORM = {"use_gated_rmsnorm": True, "norm_before_gate": False, "norm_weight": ROW, "norm_group_size": 16}


def mamba(**options: Any) -> Any:
    matrix = -jnp.ones((8, 3), jnp.bfloat16)
    arrays = (X, matrix, X[..., :3], X[..., :3], EIGHT, X, X)
    return ejkernel.state_space_v1(*arrays, dt_bias=EIGHT, dt_softplus=True, **options)[0]


def mamba_2(**options: Any) -> Any:
    arrays = (Q, -FOUR, Q[:, :, :2], Q[:, :, :2], Q[0, 0], Q[..., 0], Q.reshape(1, 6, 32))
    return ejkernel.state_space_v2(*arrays, dt_bias=FOUR, dt_softplus=True, **NORM, **options)[0]


def deepseek() -> Any:
    index = Q[:, :1, :3, :4]
    matrix = jnp.ones((8, 2, 8), jnp.bfloat16)
    arrays = (Q[:, :1], X, matrix, matrix, index, X[..., :4], index[..., 0])
    return ejkernel.deepseek_attn(*arrays, index_topk=3, kv_lens=jnp.array([5]))


CALLS: dict[str, Callable[[], Any]] = {
    "gated_rms_norm": lambda: ejkernel.gated_rms_norm(X, X, EIGHT, norm_before_gate=False, group_size=4),
    "lightning_attention": lambda: ejkernel.lightning_attention(Q, Q, Q, layer_idx=1, num_layers=3, slopes="minimax"),
    "state_space_v1, packed": lambda: mamba(cu_seqlens=BOUNDS),
    "state_space_v1, segments": lambda: mamba(seg_ids=IDS),
    "state_space_v2, packed": lambda: mamba_2(cu_seqlens=BOUNDS),
    "state_space_v2, segments": lambda: mamba_2(seg_ids=IDS),
    "mean_pooling": lambda: ejkernel.mean_pooling(X, attention_mask=IDS >= 0),
    "soft targets": lambda: ejkernel.fused_cross_entropy(X, X / 8, class_weights=EIGHT, label_smoothing=0.1).loss,
    "soft targets with a head": lambda: (
        ejkernel.fused_cross_entropy(
            targets=X / 8, hidden=X, lm_head_weight=Q[0, 0, :, :].T @ Q[0, 0], lm_head_bias=EIGHT, class_weights=EIGHT
        ).loss
    ),
    "targets' log-probabilities": lambda: ejkernel.token_logprobs(
        X, Q[0, 0].T @ Q[0, 0], IDS, lm_head_bias=EIGHT, ignore_index=-1, temperature=0.7, attention_mask=IDS >= 0
    ),
    "class weights": lambda: ejkernel.fused_cross_entropy(X, IDS, class_weights=EIGHT, ignore_index=-1).loss,
    "layer_norm": lambda: ejkernel.layer_norm(X, X[0], axis=(1, 2)),
    "rope": lambda: ejkernel.rope(Q[0], *ejkernel.LlamaRotaryEmbedding(8, per_pair=True)(jnp.arange(6))),
    "prefixes": lambda: ejkernel.flash_attention(
        Q, Q.astype(jnp.float32), Q, mask_info=ejkernel.MaskInfo.from_prefix_lengths(jnp.array([2]), 6)
    ),
    "chunk_size": lambda: ejkernel.unified_attention(
        Q[0],
        Q.reshape(3, 2, 4, 8),
        Q.reshape(3, 2, 4, 8),
        jnp.array([6]),
        jnp.array([[0, 1, 2]]),
        jnp.array([0, 6]),
        chunk_size=4,
    ),
    "native_sparse_attention": lambda: ejkernel.native_sparse_attention(
        Q[:, :1], Q, Q, g_cmp=Q[:, :1, :, 0], block_size=2, block_counts=2, window_size=2, kv_lens=jnp.array([5])
    ),
    "deepseek_attn": deepseek,
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_promoted_implicitly(name: str) -> None:
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        out = CALLS[name]()
    assert out.dtype == (jnp.float32 if "targets" in name or name == "class weights" else jnp.bfloat16)
    assert jnp.all(jnp.isfinite(out.astype(jnp.float32)))
