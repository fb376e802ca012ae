"""What core has, as names: operations, their default orders and the public functions. Nothing is imported until it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ejkernel.errors import invalid, suggestion
from ejkernel.plugin import resolve

OPERATIONS: Mapping[str, str] = {
    name: f"ejkernel.operations.{name}.interface:OPERATION"
    for name in (
        "add_rms_norm",
        "block_sparse_attention",
        "causal_conv1d",
        "cross_entropy",
        "delta_rule",
        "flash_attention",
        "gated_linear_unit",
        "grouped_matmul",
        "kl_divergence",
        "latent_paged_attention",
        "layer_norm",
        "lightning_indexer",
        "linear_cross_entropy",
        "linear_recurrence",
        "mean_pooling",
        "moe_permute",
        "moe_route",
        "moe_unpermute",
        "native_sparse_attention",
        "native_sparse_selection",
        "paged_attention",
        "paged_cache_update",
        "qk_norm_rope",
        "quantized_matmul",
        "rms_norm",
        "rope",
        "rwkv4",
        "sample_tokens",
        "scaled_matmul",
        "selective_scan",
        "softmax",
        "sparse_latent_attention",
    )
}
"""Operations and the objects that declare them."""

ORDERED = (
    "add_rms_norm",
    "block_sparse_attention",
    "causal_conv1d",
    "cross_entropy",
    "delta_rule",
    "flash_attention",
    "gated_linear_unit",
    "grouped_matmul",
    "latent_paged_attention",
    "layer_norm",
    "lightning_indexer",
    "linear_recurrence",
    "mean_pooling",
    "moe_permute",
    "moe_route",
    "moe_unpermute",
    "native_sparse_attention",
    "native_sparse_selection",
    "paged_attention",
    "paged_cache_update",
    "qk_norm_rope",
    "quantized_matmul",
    "rms_norm",
    "rope",
    "rwkv4",
    "sample_tokens",
    "selective_scan",
    "softmax",
    "sparse_latent_attention",
)
"""Operations that have a default order."""

FUNCTIONS = (
    "apply_native_sparse_attention",
    "attention",
    "blocksparse_attention",
    "causal_conv1d",
    "chunked_prefill_paged_decode",
    "decode_attention",
    "deepseek_attn",
    "flash_attention",
    "flash_attn_varlen",
    "flash_mla",
    "fused_add_rms_norm",
    "fused_cross_entropy",
    "fused_kl_divergence",
    "fused_qk_norm_rope",
    "gated_delta_product",
    "gated_delta_rule",
    "gated_linear_unit",
    "gated_rms_norm",
    "gla",
    "gla_attention",
    "grouped_matmul",
    "kernel_delta_attention",
    "layer_norm",
    "lightning_attention",
    "lightning_attn",
    "llama_rope",
    "mamba3",
    "mean_pooling",
    "mlstm",
    "moe_permute",
    "moe_route",
    "moe_unpermute",
    "multi_head_latent_attention",
    "multi_latent_ragged_page_attention",
    "multi_latent_ragged_page_attention_v2",
    "native_spare_attention",
    "native_sparse_attention",
    "page_attention",
    "paged_cache_update",
    "prefill_page_attention",
    "quantized_matmul",
    "ragged_decode_attention",
    "ragged_gated_delta_rule",
    "ragged_page_attention_v2",
    "ragged_page_attention_v3",
    "recurrent",
    "recurrent_attention",
    "retention",
    "ring_attention",
    "rms_norm",
    "rope",
    "rwkv4",
    "rwkv6",
    "rwkv7",
    "rwkv7_mul",
    "sample_tokens",
    "scaled_dot_product_attention",
    "scaled_matmul",
    "softmax",
    "state_space_v1",
    "state_space_v2",
    "token_logprobs",
    "unified_attention",
)
"""The public functions, by the names that `explain`, `kernel_registry.get` and the command line accept."""

HELPERS = (
    "all_gather_matmul",
    "block_sparse_layout",
    "create_default_executor",
    "moe_load_balancing_loss",
    "moe_z_loss",
    "reduce_scatter_matmul",
    "sequence_parallel",
    "zigzag_shard",
    "zigzag_unshard",
)
"""Functions of `ejkernel.modules` that dispatch nothing."""


def default_order(operation: str) -> Mapping[str, Mapping[str, Any]]:
    """Backend -> implementation or platform -> where it stands, a number or a rule; empty where nothing was measured."""
    return resolve(f"ejkernel.operations.{operation}.order:ORDER") if operation in ORDERED else {}


def public_function(name: str) -> Callable[..., Any]:
    """The public function of this name in `ejkernel.modules`.

    Raises:
        ValueError: there is none; the message suggests a close name.
    """
    if name not in FUNCTIONS:
        plain = "; that one is the same on every platform" if name in HELPERS else suggestion(name, FUNCTIONS)
        raise invalid("operation", repr(name), "the name of a public function that platforms implement" + plain)
    return resolve(f"ejkernel.modules:{name}")
