"""The plugin module of ejkernel-pallas. Imports only the standard library and `ejkernel.plugin`."""

from __future__ import annotations

from ejkernel.plugin import API_LEVEL, Implementation, Phase, Plugin, hookimpl, tables_beside

_PHASES: tuple[Phase, ...] = ("forward", "backward")
_SPARSE = ("key_tiles", "full_tiles", "q_blocksize", "kv_blocksize", "mask_builder")
"""What the kernels of `flash_attention`, which also run `block_sparse_attention`, do not take of it."""
_TPU: dict[str, tuple[Phase, ...]] = {
    "flash_attention": _PHASES,
    "grouped_matmul": _PHASES,
    "paged_attention": ("forward",),
    "paged_cache_update": ("forward",),
    "rms_norm": _PHASES,
    "block_sparse_attention": _PHASES,
}
_TPU_WITHOUT: dict[str, tuple[str, ...]] = {
    "grouped_matmul": ("lhs_scale",),
    "block_sparse_attention": _SPARSE,
}
_MOSAIC_GPU: dict[str, tuple[str, ...]] = {
    "flash_attention": ("mask", "dropout_streams", "dropout_rate", "logits_dtype"),
    "grouped_matmul": (),
    "block_sparse_attention": (*_SPARSE, "mask"),
}
"""Operation -> fields of the call that its kernels do not honour."""


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
        without=_TPU_WITHOUT.get(operation, ()),
    )


def _mosaic_gpu(operation: str, phase: Phase) -> Implementation:
    """One phase of an operation on Hopper GPUs: `mosaic_gpu/<operation>/{kernel,capability,config}.py`."""
    package = f"ejkernel_pallas.mosaic_gpu.{operation}"
    return Implementation(
        operation=operation,
        phase=phase,
        variant="mosaic_gpu",
        backends=("gpu",),
        target=f"{package}.kernel:{phase}",
        supports=f"{package}.capability:supports_{phase}",
        configs=f"{package}.config:{phase.upper()}",
        without=_MOSAIC_GPU[operation],
        lowered_from="ejkernel_pallas.mosaic_gpu._device:lowered_from",
    )


@hookimpl
def ejkernel_plugin() -> Plugin:
    return Plugin(
        name="pallas",
        api_level=API_LEVEL,
        summary="Pallas kernels: TPU through Mosaic, Hopper GPUs through Mosaic GPU",
        custom_calls=("mosaic_gpu_v2",),
        implementations=(
            *(_tpu(operation, phase) for operation, phases in _TPU.items() for phase in phases),
            *(_mosaic_gpu(operation, phase) for operation in _MOSAIC_GPU for phase in _PHASES),
        ),
    )


@hookimpl
def ejkernel_tuned_configs() -> list[str]:
    return tables_beside(__file__)
