"""Calling compiled code: `ejit`, and the two entry points for kernels of one's own, each imported when it is first asked for."""

from __future__ import annotations

import importlib
from typing import Any

from ejkernel.callib._ejit import ejit
from ejkernel.callib._triton import triton_call
from ejkernel.utils.sizes import cdiv, next_power_of_2

_LAZY = {"pallas_call": "jax.experimental.pallas"}

__all__ = [
    "cdiv",
    "ejit",
    "next_power_of_2",
    "pallas_call",  # pyright: ignore[reportUnsupportedDunderAll]
    "triton_call",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ejkernel.callib' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
