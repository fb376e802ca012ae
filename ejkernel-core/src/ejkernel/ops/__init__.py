"""The programmatic API of config selection: operations of one's own with configs, and the tiers that choose them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what `__getattr__` below finds at run time
    from ejkernel.modules import Executor as Executor, create_default_executor as create_default_executor
    from ejkernel.ops._caches import (
        ConfigCache as ConfigCache,
        PersistentCache as PersistentCache,
        overlay_cache as overlay_cache,
    )
    from ejkernel.ops._callable import Kernel as Kernel
    from ejkernel.ops._kernel import Invocation as Invocation
    from ejkernel.ops._policy import AutotunePolicy as AutotunePolicy, policy_override as policy_override
    from ejkernel.ops._selection import ConfigSelectorChain as ConfigSelectorChain
    from ejkernel.tuning import (
        AutotuningResult as AutotuningResult,
        BwdParams as BwdParams,
        Entry as Entry,
        FwdParams as FwdParams,
        Tuner as Tuner,
        autotune as autotune,
        forward_autotune_only as forward_autotune_only,
        install_tuner as install_tuner,
        record_calls as record_calls,
    )

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

if not TYPE_CHECKING:  # checkers would take it to define every name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            return getattr(importlib.import_module(_LAZY[name]), name)
        raise AttributeError(f"module 'ejkernel.ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
