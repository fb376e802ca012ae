"""ejkernel: the fastest correct kernel on whatever machine you have, from one call."""

from __future__ import annotations

import importlib
from typing import Any

from ejkernel._version import __version__ as __version__

_SUBMODULES = (
    "callib",
    "loggings",
    "masks",
    "modules",
    "ops",
    "packing",
    "plugin",
    "quantization",
    "testing",
    "tuning",
    "types",
    "utils",
    "xla_utils",
)

_LAZY = {
    "EXPORT_DISABLED_CHECKS": "ejkernel._plugins.export",
    "MaskInfo": "ejkernel.masks",
    "explain": "ejkernel._dispatch.explanation",
    "use": "ejkernel.call.policy",
    **dict.fromkeys(("Backend", "Platform", "kernel_registry"), "ejkernel._plugins.registry"),
    **dict.fromkeys(("autotune", "overlay"), "ejkernel.tuning"),
    **dict.fromkeys(
        ("EjkernelError", "NoConfigError", "NoKernelError", "NoTunerError", "PluginError", "TracingError"), "ejkernel.errors"
    ),
}
"""Names and where they live; the public functions and their class APIs are those of `ejkernel.modules`."""


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"ejkernel.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if not name.startswith("_"):
        modules = importlib.import_module("ejkernel.modules")
        if name in modules.__all__:
            return getattr(modules, name)
    raise AttributeError(f"module 'ejkernel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_SUBMODULES, *importlib.import_module("ejkernel.modules").__all__})


def _discover() -> None:
    from ejkernel._plugins.discovery import discover
    from ejkernel._plugins.registry import kernel_registry

    kernel_registry.load(discover())


_discover()
