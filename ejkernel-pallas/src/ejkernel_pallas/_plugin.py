"""The plugin module of ejkernel-pallas. Imports only the standard library and `ejkernel.plugin`."""

from __future__ import annotations

import dataclasses

from ejkernel.plugin import API_LEVEL, Implementation, Phase, Plugin, hookimpl, tables_beside

_PHASES: tuple[Phase, ...] = ("forward", "backward")
_TPU: dict[str, tuple[Phase, ...]] = {
    "flash_attention": _PHASES,
    "grouped_matmul": _PHASES,
    "paged_attention": ("forward",),
    "paged_cache_update": ("forward",),
    "rms_norm": _PHASES,
}
_TPU_WITHOUT: dict[str, tuple[str, ...]] = {
    "grouped_matmul": ("lhs_scale",),
}
_MOSAIC_GPU: dict[str, tuple[str, ...]] = {
    "flash_attention": ("mask", "dropout_streams", "dropout_rate", "logits_dtype"),
    "grouped_matmul": (),
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
        lowered_from="ejkernel_pallas.mosaic_gpu._call:lowered_from",
    )


def _by_flash_attention(listed: Implementation) -> Implementation:
    """The phase of `flash_attention` as one of `block_sparse_attention`, in one module."""
    module = f"ejkernel_pallas.{listed.variant}.block_sparse_attention"
    masks = () if listed.variant == "tpu" else ("mask",)
    return dataclasses.replace(
        listed,
        operation="block_sparse_attention",
        target=f"{module}:{listed.phase}",
        supports=f"{module}:supports" + ("" if listed.variant == "tpu" else f"_{listed.phase}"),
        configs=f"{module}:{listed.phase.upper()}",
        without=("key_tiles", "full_tiles", "q_blocksize", "kv_blocksize", "mask_builder", *masks),
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
            *(_by_flash_attention(kind("flash_attention", phase)) for kind in (_tpu, _mosaic_gpu) for phase in _PHASES),
        ),
    )


@hookimpl
def ejkernel_tuned_configs() -> list[str]:
    return tables_beside(__file__)
