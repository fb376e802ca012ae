"""ejkernel: the fastest correct kernel on whatever machine you have, from one call."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what `__getattr__` below finds at run time
    from ejkernel import (
        callib as callib,
        loggings as loggings,
        masks as masks,
        modules as modules,
        ops as ops,
        packing as packing,
        plugin as plugin,
        quantization as quantization,
        testing as testing,
        tuning as tuning,
        types as types,
        typing as typing,
        utils as utils,
        xla_utils as xla_utils,
    )
    from ejkernel._dispatch.explanation import (
        explain as explain,
    )
    from ejkernel._plugins.export import (
        EXPORT_DISABLED_CHECKS as EXPORT_DISABLED_CHECKS,
    )
    from ejkernel._plugins.registry import (
        Backend as Backend,
        Platform as Platform,
        kernel_registry as kernel_registry,
    )
    from ejkernel.call.policy import (
        use as use,
    )
    from ejkernel.errors import (
        AnnotationError as AnnotationError,
        EjkernelError as EjkernelError,
        NoConfigError as NoConfigError,
        NoKernelError as NoKernelError,
        NoTunerError as NoTunerError,
        PluginError as PluginError,
        TracingError as TracingError,
    )
    from ejkernel.masks import (
        MaskInfo as MaskInfo,
    )
    from ejkernel.modules import *
    from ejkernel.tuning import (
        autotune as autotune,
        overlay as overlay,
    )

from ejkernel._version import __version__ as __version__

_SUBMODULES = (
    "callib",
    "kernels",
    "logging_utils",
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
    "typing",
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
        ("AnnotationError", "EjkernelError", "NoConfigError", "NoKernelError", "NoTunerError", "PluginError", "TracingError"),
        "ejkernel.errors",
    ),
}
"""Names and where they live; the public functions and their class APIs are those of `ejkernel.modules`."""


if not TYPE_CHECKING:  # checkers would take it to define every name, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return importlib.import_module(f"ejkernel.{name}")
        if name == "__all__":
            return ["__version__", *_names()]
        source = importlib.import_module(_LAZY.get(name, "ejkernel.modules"))
        if name.startswith("_") or name == "FUNCTIONS" or not hasattr(source, name):
            raise AttributeError(f"module 'ejkernel' has no attribute {name!r}")
        return globals().setdefault(name, getattr(source, name))


def _names() -> list[str]:
    return sorted({*_LAZY, *importlib.import_module("ejkernel.modules").__all__} - {"FUNCTIONS"})


def __dir__() -> list[str]:
    return sorted({"__version__", *_SUBMODULES, *_names()})


def _discover() -> None:
    from ejkernel._plugins.discovery import discover
    from ejkernel._plugins.early_imports import import_early
    from ejkernel._plugins.registry import kernel_registry

    records = discover()
    kernel_registry.load(records)
    import_early(records)


if not getattr(sys.modules.get("ejkernel_launcher"), "running", False):  # that program discovers plugins when a command runs
    _discover()
