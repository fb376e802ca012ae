"""The light plugin module of ejkernel-cuda: imports the standard library and `ejkernel.plugin` only."""

from __future__ import annotations

from collections.abc import Callable

from ejkernel.plugin import API_LEVEL, Implementation, Phase, Plugin, hookimpl

_VERSIONS = {"rms_norm": 2}
"""Of implementations whose stored timings a change has made meaningless."""


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
        version=_VERSIONS.get(operation, 1),
    )


_OPERATIONS: dict[str, tuple[Phase, ...]] = {
    "add_rms_norm": ("forward", "backward"),
    "layer_norm": ("forward", "backward"),
    "paged_cache_update": ("forward",),
    "qk_norm_rope": ("forward", "backward"),
    "rms_norm": ("forward", "backward"),
    "rope": ("forward", "backward"),
    "softmax": ("forward", "backward"),
}

HANDLERS = (
    "add_rms_norm_forward",
    "add_rms_norm_backward",
    "layer_norm_forward",
    "layer_norm_backward",
    "paged_cache_update_forward",
    "qk_norm_rope_forward",
    "qk_norm_rope_backward",
    "qk_norm_rope_angle_gradients",
    "rms_norm_forward",
    "rms_norm_backward",
    "rope_rotate",
    "rope_angle_gradients",
    "softmax_forward",
    "softmax_backward",
)
"""What the library exports, without its prefix."""


@hookimpl
def ejkernel_plugin() -> Plugin:
    return Plugin(
        name="cuda",
        api_level=API_LEVEL,
        summary="CUDA C++ kernels for NVIDIA GPUs, in one shared library",
        implementations=tuple(_implementation(name, phase) for name, phases in _OPERATIONS.items() for phase in phases),
        custom_calls=tuple(f"ejkernel_cuda_{name}" for name in HANDLERS),
    )


@hookimpl
def ejkernel_diagnose(report: Callable[[str, str], None]) -> None:
    from ejkernel_cuda._library import PATH, driver_problem, library_problem, load

    report("library", library_problem() or str(PATH))
    if not library_problem():
        load()
        report("load", "the library loads and fits this jaxlib")
    report("driver", driver_problem() or "NVIDIA's driver loads and sees a GPU")
