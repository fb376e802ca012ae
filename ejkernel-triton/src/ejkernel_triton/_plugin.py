"""The plugin module of ejkernel-triton. Imports only the standard library, `ejkernel.plugin` and `_interpret`."""

from __future__ import annotations

from collections.abc import Callable

from ejkernel.plugin import API_LEVEL, Implementation, Phase, Plugin, hookimpl, tables_beside
from ejkernel_triton._interpret import INTERPRET, interpreting


def _implementation(
    operation: str, phase: Phase, contract: int = 1, without: tuple[str, ...] = (), *, knobs: bool = True
) -> Implementation:
    """One phase of an operation: `<operation>/{kernel,capability,config}.py`, the last if it has knobs of its own."""
    package = f"ejkernel_triton.{operation}"
    return Implementation(
        operation=operation,
        phase=phase,
        backends=("gpu", "cpu") if interpreting() else ("gpu",),
        target=f"{package}.kernel:{phase}",
        supports=f"{package}.capability:supports_{phase}",
        configs=f"{package}.config:{phase.upper()}" if knobs else None,
        contract=contract,
        without=without,
        lowered_from="ejkernel_triton._jax_triton:lowered_from",
    )


def _both_phases(operation: str, contract: int = 1, without: tuple[str, ...] = ()) -> tuple[Implementation, ...]:
    return tuple(_implementation(operation, phase, contract, without) for phase in ("forward", "backward"))


@hookimpl
def ejkernel_plugin() -> Plugin:
    return Plugin(
        name="triton",
        api_level=API_LEVEL,
        summary="Triton kernels for NVIDIA GPUs, through jax-triton",
        requires=("triton", "jax_triton"),
        versions={"triton": ">=3.6,<4", "jax-triton": ">=0.3.1,<0.4"},
        implementations=(
            *_both_phases("add_rms_norm"),
            *_both_phases("block_sparse_attention", contract=2),
            *_both_phases("causal_conv1d"),
            *_both_phases("cross_entropy"),
            *_both_phases("delta_rule"),
            *_both_phases("flash_attention", contract=2),
            _implementation("fused_linear", "forward"),
            _implementation("fused_linear", "backward", knobs=False),
            *_both_phases("gated_linear_unit"),
            *_both_phases("grouped_matmul", without=("lhs_scale",)),
            *_both_phases("kl_divergence"),
            *_both_phases("latent_paged_attention", contract=2),
            *_both_phases("layer_norm"),
            _implementation("lightning_indexer", "forward"),
            *_both_phases("linear_cross_entropy"),
            *_both_phases("linear_recurrence", contract=2, without=("gv",)),
            *_both_phases("mean_pooling"),
            *_both_phases("moe_permute"),
            *_both_phases("moe_route"),
            *_both_phases("moe_unpermute"),
            *_both_phases("native_sparse_attention"),
            _implementation("native_sparse_selection", "forward"),
            _implementation("newton_schulz", "forward"),
            *_both_phases("paged_attention"),
            *_both_phases("paged_cache_update"),
            *_both_phases("qk_norm_rope"),
            _implementation("quantize_float8", "forward"),
            *_both_phases("quantized_matmul", contract=2),
            *_both_phases("rms_norm"),
            *_both_phases("rope"),
            *_both_phases("rwkv4"),
            _implementation("sample_tokens", "forward"),
            *_both_phases("scaled_matmul", contract=3),
            *_both_phases("selective_scan", contract=2),
            *_both_phases("softmax"),
            *_both_phases("sparse_latent_attention"),
        ),
        custom_calls=("triton_kernel_call", "triton_kernel_call_ffi"),
    )


@hookimpl
def ejkernel_tuned_configs() -> list[str]:
    return tables_beside(__file__)


@hookimpl
def ejkernel_diagnose(report: Callable[[str, str], None]) -> None:
    from ejkernel_triton._bundles import findings
    from ejkernel_triton._versions import installed, version_problem

    report("versions", ", ".join(f"{name} {version or 'missing'}" for name, version in installed().items()))
    report("jax-triton", version_problem() or "no known problem with these versions")
    report("compiled kernels", _cache_state())
    for folder, finding in findings():
        report(f"bundle {folder}", finding)
    if interpreting():
        report("interpreter", f"{INTERPRET} is set: kernels run on the host, very slowly")


def _cache_state() -> str:
    from ejkernel_triton._kernel_cache import STORE
    from ejkernel_triton._versions import version_problem

    if version_problem():
        return "none without a jax-triton that works"
    from ejkernel_triton._jax_triton import cache_problem

    return cache_problem() or f"kept in {STORE.folder}"
