"""The light plugin module of ejkernel-cuda: imports the standard library and `ejkernel.plugin` only."""

from __future__ import annotations

from collections.abc import Callable

from ejkernel.plugin import API_LEVEL, Implementation, Phase, Plugin, hookimpl


def _implementation(operation: str, phase: Phase) -> Implementation:
    """One phase of an operation: `<operation>/{kernel,capability,config}.py`."""
    package = f"ejkernel_cuda.{operation}"
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
        name="cuda",
        api_level=API_LEVEL,
        summary="CUDA C++ kernels for NVIDIA GPUs, in one shared library",
        implementations=(_implementation("rms_norm", "forward"), _implementation("rms_norm", "backward")),
        custom_calls=("ejkernel_cuda_rms_norm_forward", "ejkernel_cuda_rms_norm_backward"),
    )


@hookimpl
def ejkernel_diagnose(report: Callable[[str, str], None]) -> None:
    from ejkernel_cuda._library import PATH, library_problem, load

    report("library", library_problem() or str(PATH))
    if not library_problem():
        load()
        report("load", "the library loads and fits this jaxlib")
