"""ejkernel: the fastest correct kernel on whatever machine you have, from one call."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    **dict.fromkeys(("Backend", "Platform", "kernel_registry"), "ejkernel._registry"),
    "use": "ejkernel._policy",
    "explain": "ejkernel._explain",
    **dict.fromkeys(("autotune", "overlay"), "ejkernel.tuning"),
    **dict.fromkeys(("NoConfigError", "NoKernelError", "NoTunerError", "PluginError", "EjkernelError"), "ejkernel.errors"),
    **dict.fromkeys(("Executor", "create_default_executor"), "ejkernel.modules"),
    **dict.fromkeys(("layer_norm", "LayerNorm", "rms_norm", "RmsNorm"), "ejkernel.modules"),
    **dict.fromkeys(("attention", "flash_attention", "flash_attn_varlen", "scaled_dot_product_attention"), "ejkernel.modules"),
    **dict.fromkeys(("Attention", "FlashAttention", "FlashAttnVarlen", "ScaledDotProductAttention"), "ejkernel.modules"),
    **dict.fromkeys(("LlamaRope", "LlamaRotaryEmbedding", "Rope", "llama_rope", "rope"), "ejkernel.modules"),
    **dict.fromkeys(("softmax", "Softmax"), "ejkernel.modules"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ejkernel' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def _discover() -> None:
    from ejkernel._discovery import discover
    from ejkernel._registry import kernel_registry

    kernel_registry.load(discover())


_discover()
