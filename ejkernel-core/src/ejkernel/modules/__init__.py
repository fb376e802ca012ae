"""The public functions and their class forms: thin facades over the operations."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.modules._forms import Executor, create_default_executor
from ejkernel.modules.norms import LayerNorm, RmsNorm, layer_norm, rms_norm

FUNCTIONS: Mapping[str, str] = {
    "layer_norm": "layer_norm",
    "rms_norm": "rms_norm",
}
"""Public function by every name that `explain`, `kernel_registry.get` and the command line accept."""

__all__ = [
    "FUNCTIONS",
    "Executor",
    "LayerNorm",
    "RmsNorm",
    "create_default_executor",
    "layer_norm",
    "rms_norm",
]
