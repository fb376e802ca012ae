"""The light plugin module of ejkernel-pallas: imports the standard library and `ejkernel.plugin` only."""

from __future__ import annotations

from ejkernel.plugin import API_LEVEL, Implementation, Phase, Plugin, hookimpl

_TPU = ("flash_attention", "grouped_matmul", "rms_norm")
_PHASES: tuple[Phase, ...] = ("forward", "backward")


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
        implementations=tuple(_tpu(operation, phase) for operation in _TPU for phase in _PHASES),
    )
