"""The plugin module of ejkernel-cuda. It imports only the standard library and `ejkernel.plugin`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ejkernel.plugin import API_LEVEL, Implementation, Phase, Plugin, hookimpl

_VERSIONS = {"flash_attention": 2, "paged_attention": 2, "paged_cache_update": 2, "rms_norm": 2}
"""Versions of operations whose stored timings a change has made meaningless."""

_MASKS = ("causal", "query_offset", "window")
_PREFILL = (
    "value_pages",
    "softmax_aux",
    "layout",
    "key_heads",
    "causal",
    "window",
    "logits_soft_cap",
    "precision",
    "return_lse",
)


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
        accepts=(*_MASKS, "prefix", "logits_soft_cap", "precision", "return_lse") if operation == "flash_attention" else None,
    )


def _cudnn(operation: str, phase: Phase) -> Implementation:
    """One phase of an operation in cuDNN: `cudnn/<operation>/{kernel,capability}.py`."""
    package = f"ejkernel_cuda.cudnn.{operation}"
    return Implementation(
        operation=operation,
        phase=phase,
        variant="cudnn",
        backends=("gpu",),
        target=f"{package}.kernel:{phase}",
        supports=f"{package}.capability:supports_{phase}",
        accepts=(*_MASKS, "precision", "return_lse"),
        priority=-1,  # behind this platform's own kernels
    )


def _prefill() -> Implementation:
    """`paged_attention` for many new tokens: `paged_prefill/{kernel,capability,config}.py`."""
    package = "ejkernel_cuda.paged_prefill"
    return Implementation(
        operation="paged_attention",
        phase="forward",
        variant="prefill",
        backends=("gpu",),
        target=f"{package}.kernel:forward",
        supports=f"{package}.capability:supports_forward",
        configs=f"{package}.config:FORWARD",
        accepts=_PREFILL,
        priority=-1,  # behind the kernel for decoding
    )


def _by_flash_attention(listed: Implementation) -> Implementation:
    """The phase of `flash_attention` as one of `block_sparse_attention`, in one module."""
    module = "ejkernel_cuda." + ("cudnn." if listed.variant else "") + "block_sparse_attention"
    return dataclasses.replace(
        listed,
        operation="block_sparse_attention",
        target=f"{module}:{listed.phase}",
        supports=f"{module}:supports_{listed.phase}",
        configs=listed.configs and f"{module}:{listed.phase.upper()}",
        accepts=tuple(name for name in listed.accepts or () if name not in ("precision", "return_lse")),
    )


_OPERATIONS: dict[str, tuple[Phase, ...]] = {
    "add_rms_norm": ("forward", "backward"),
    "flash_attention": ("forward",),
    "layer_norm": ("forward", "backward"),
    "paged_attention": ("forward",),
    "paged_cache_update": ("forward",),
    "qk_norm_rope": ("forward", "backward"),
    "rms_norm": ("forward", "backward"),
    "rope": ("forward", "backward"),
    "softmax": ("forward", "backward"),
}

_CUDNN: dict[str, tuple[Phase, ...]] = {"flash_attention": ("forward", "backward")}

HANDLERS = (
    "add_rms_norm_forward",
    "add_rms_norm_backward",
    "flash_attention_forward",
    "layer_norm_forward",
    "layer_norm_backward",
    "paged_attention_forward",
    "paged_cache_update_forward",
    "paged_prefill_forward",
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
"""Exported handlers, without their prefix."""

CUDNN_CALLS = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
"""Custom calls that XLA itself implements."""


@hookimpl
def ejkernel_plugin() -> Plugin:
    return Plugin(
        name="cuda",
        api_level=API_LEVEL,
        summary="CUDA C++ kernels for NVIDIA GPUs, in one shared library, and cuDNN's attention",
        implementations=(
            *(_implementation(name, phase) for name, phases in _OPERATIONS.items() for phase in phases),
            *(_cudnn(name, phase) for name, phases in _CUDNN.items() for phase in phases),
            _prefill(),
            _by_flash_attention(_implementation("flash_attention", "forward")),
            *(_by_flash_attention(_cudnn("flash_attention", phase)) for phase in ("forward", "backward")),
        ),
        custom_calls=(*(f"ejkernel_cuda_{name}" for name in HANDLERS), *CUDNN_CALLS),
    )


@hookimpl
def ejkernel_diagnose(report: Callable[[str, str], None]) -> None:
    from ejkernel_cuda._library import PATH, driver_problem, library_problem, load
    from ejkernel_cuda.cudnn._call import installed_version

    report("library", library_problem() or str(PATH))
    if not library_problem():
        load()
        report("load", "the library loads and fits this jaxlib")
    report("driver", driver_problem() or "NVIDIA's driver loads and sees a GPU")
    version = installed_version()
    report("cudnn", ".".join(map(str, version)) if version else "no cuDNN distribution of jax's CUDA plugin is installed")
