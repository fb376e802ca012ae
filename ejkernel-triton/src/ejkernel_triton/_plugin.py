"""The light plugin module of ejkernel-triton: imports the standard library and `ejkernel.plugin` only."""

from __future__ import annotations

from collections.abc import Callable

from ejkernel.plugin import API_LEVEL, Implementation, Phase, Plugin, hookimpl


def _implementation(operation: str, phase: Phase) -> Implementation:
    """One phase of an operation: `<operation>/{kernel,capability,config}.py`."""
    package = f"ejkernel_triton.{operation}"
    return Implementation(
        operation=operation,
        phase=phase,
        backends=("gpu",),
        target=f"{package}.kernel:{phase}",
        supports=f"{package}.capability:supports_{phase}",
        configs=f"{package}.config:{phase.upper()}",
    )


@hookimpl
def ejkernel_plugin() -> Plugin:
    return Plugin(
        name="triton",
        api_level=API_LEVEL,
        summary="Triton kernels for NVIDIA GPUs, through jax-triton",
        requires=("triton", "jax_triton"),
        versions={"triton": ">=3.6,<4", "jax-triton": ">=0.3.1"},
        implementations=(
            _implementation("rms_norm", "forward"),
            _implementation("rms_norm", "backward"),
            _implementation("paged_attention", "forward"),
            _implementation("paged_cache_update", "forward"),
        ),
        custom_calls=("triton_kernel_call",),
    )


@hookimpl
def ejkernel_diagnose(report: Callable[[str, str], None]) -> None:
    from ejkernel_triton._versions import installed, version_problem

    report("versions", ", ".join(f"{name} {version or 'missing'}" for name, version in installed().items()))
    report("jax-triton", version_problem() or "no known problem with these versions")
