"""The light plugin module of ejkernel-pallas: imports the standard library and `ejkernel.plugin` only."""

from __future__ import annotations

from ejkernel.plugin import API_LEVEL, Implementation, Phase, Plugin, hookimpl

_PHASES: tuple[Phase, ...] = ("forward", "backward")
_TPU: dict[str, tuple[Phase, ...]] = {
    "flash_attention": _PHASES,
    "grouped_matmul": _PHASES,
    "paged_attention": ("forward",),
    "paged_cache_update": ("forward",),
    "rms_norm": _PHASES,
}


def _tpu(operation: str, phase: Phase) -> Implementation:
    """One phase of an operation on TPU: `tpu/<operation>/{kernel,capability,config}.py`."""
    package = f"ejkernel_pallas.tpu.{operation}"
    return Implementation(
        operation=operation,
        phase=phase,
        variant="tpu",
        backends=("tpu",),
        target=f"{package}.kernel:{phase}",
        supports=f"{package}.capability:supports",
        configs=f"{package}.config:{phase.upper()}",
    )


@hookimpl
def ejkernel_plugin() -> Plugin:
    return Plugin(
        name="pallas",
        api_level=API_LEVEL,
        summary="Pallas kernels: TPU through Mosaic",
        implementations=tuple(_tpu(operation, phase) for operation, phases in _TPU.items() for phase in phases),
    )
