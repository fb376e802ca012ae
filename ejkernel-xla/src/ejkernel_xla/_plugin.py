"""The plugin module of ejkernel-xla. Imports only the standard library and `ejkernel.plugin`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel.plugin import API_LEVEL, Implementation, Phase, Plugin, hookimpl


def _both_phases(operation: str, prefix: str = "", configs: str | None = None, **record: object) -> tuple[Implementation, ...]:
    """Plain JAX code for both phases of one operation, `ejkernel_xla.<operation>:<prefix>forward` and `...backward`."""
    return _phases(operation, ("forward", "backward"), prefix, configs, **record)


def _phases(
    operation: str, phases: tuple[Phase, ...], prefix: str = "", configs: str | None = None, **record: object
) -> tuple[Implementation, ...]:
    """As `_both_phases`, of these phases. `{phase}` in configs becomes FORWARD or BACKWARD."""
    record = {"partitioning": "native", "plain_jax": True, **record}
    return tuple(
        Implementation(
            operation=operation,
            phase=phase,
            target=f"ejkernel_xla.{operation}:{prefix}{phase}",
            **{**record, "configs": configs and configs.format(phase=phase.upper())},  # pyright: ignore[reportArgumentType]
        )
        for phase in phases
    )


_BLOCK_SPARSE: Mapping[str, Any] = {"configs": "ejkernel_xla.block_sparse_attention.config:CONFIGS", "contract": 2}


@hookimpl
def ejkernel_plugin() -> Plugin:
    return Plugin(
        name="xla",
        api_level=API_LEVEL,
        summary="Every operation in plain JAX, on every device; the fallback of all others",
        implementations=(
            *_both_phases("add_rms_norm"),
            # The loop over listed tiles has a dynamic trip count: JAX cannot differentiate it, nor XLA partition it.
            *_both_phases("block_sparse_attention", partitioning="opaque", plain_jax=False, **_BLOCK_SPARSE),
            *_both_phases("block_sparse_attention", "plain_", variant="plain", priority=-1, **_BLOCK_SPARSE),
            *_both_phases("causal_conv1d"),
            *_both_phases("cross_entropy", configs="ejkernel_xla._vocabulary:CONFIGS"),
            *_both_phases("delta_rule", configs="ejkernel_xla.delta_rule.config:{phase}"),
            *_both_phases("flash_attention", contract=2, configs="ejkernel_xla.flash_attention.config:CONFIGS"),
            *_both_phases("fused_linear"),
            *_both_phases("gated_linear_unit"),
            *_both_phases("grouped_matmul", configs="ejkernel_xla.grouped_matmul.config:CONFIGS"),
            *_both_phases("kl_divergence", configs="ejkernel_xla._vocabulary:CONFIGS"),
            *_both_phases("latent_paged_attention", contract=2, configs="ejkernel_xla.latent_paged_attention.kernel:CONFIGS"),
            *_both_phases("layer_norm"),
            *_phases("lightning_indexer", ("forward",)),
            *_both_phases("linear_cross_entropy", configs="ejkernel_xla.linear_cross_entropy.kernel:CONFIGS"),
            *_both_phases("linear_recurrence", contract=2, configs="ejkernel_xla.linear_recurrence.config:{phase}"),
            *_both_phases("mean_pooling"),
            *_both_phases("moe_permute"),
            *_both_phases("moe_route"),
            *_both_phases("moe_unpermute"),
            *_both_phases("native_sparse_attention", configs="ejkernel_xla.native_sparse_attention.config:CONFIGS"),
            *_phases("native_sparse_selection", ("forward",)),
            *_phases("newton_schulz", ("forward",)),
            *_both_phases("paged_attention", contract=2, configs="ejkernel_xla.paged_attention.config:CONFIGS"),
            *_both_phases("paged_cache_update"),
            *_both_phases("qk_norm_rope"),
            *_phases("quantize_float8", ("forward",)),
            *_both_phases("quantized_matmul", contract=2, configs="ejkernel_xla.quantized_matmul.config:CONFIGS"),
            *_both_phases("rms_norm"),
            *_both_phases("rope"),
            *_both_phases("rwkv4", configs="ejkernel_xla.rwkv4.config:CONFIGS"),
            *_phases("sample_tokens", ("forward",)),
            *_both_phases("scaled_matmul", configs="ejkernel_xla.scaled_matmul.config:CONFIGS"),
            *_both_phases("selective_scan", contract=2, configs="ejkernel_xla.selective_scan.config:CONFIGS"),
            *_both_phases("softmax"),
            *_both_phases("sparse_latent_attention", configs="ejkernel_xla.sparse_latent_attention.config:CONFIGS"),
        ),
    )
