"""The programmatic API of config selection: operations of one's own with configs, and the tiers that choose them."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "Invocation": "ejkernel.ops._kernel",
    "Kernel": "ejkernel.ops._callable",
    **dict.fromkeys(("AutotunePolicy", "policy_override"), "ejkernel.ops._policy"),
    **dict.fromkeys(("ConfigCache", "PersistentCache", "overlay_cache"), "ejkernel.ops._caches"),
    "ConfigSelectorChain": "ejkernel.ops._selection",
    **dict.fromkeys(("Executor", "create_default_executor"), "ejkernel.modules"),
    **dict.fromkeys(("BwdParams", "FwdParams"), "ejkernel.tuning"),
    **dict.fromkeys(
        ("AutotuningResult", "Entry", "Tuner", "autotune", "forward_autotune_only", "install_tuner", "record_calls"),
        "ejkernel.tuning",
    ),
}

__all__ = sorted(_LAZY)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ejkernel.ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
