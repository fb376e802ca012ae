"""Former paths of kernels, such as `ejkernel.kernels._xla.flash_attention`: the public functions, each on the path's platform.

All is made of `FOLDERS`. Nothing is imported before it is asked for, and every use warns with the public name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ejkernel._plugins.catalog import functions_in
from ejkernel.errors import warn
from ejkernel.plugin import resolve
from ejkernel.utils.former_paths import FormerModule, former_module, same_names

FOLDERS: Mapping[str, Mapping[str, str]] = {
    **{name: {name: name} for name in functions_in("ejkernel.modules")},
    "flash_attn": {"flash_attention": "flash_attention"},
    "gla": {"gla": "gla", "recurrent_gla": "gla"},
    "grouped_matmulv2": {"grouped_matmulv2": "grouped_matmul"},
    "grouped_matmulv3": {"grouped_matmulv3": "grouped_matmul"},
    "kernel_delta_attention": {"kda": "kernel_delta_attention", "kernel_delta_attention": "kernel_delta_attention"},
    "native_sparse_attention": {
        "apply_native_sparse_attention": "apply_native_sparse_attention",
        "native_sparse_attention": "native_sparse_attention",
    },
    "rwkv7": {"rwkv7": "rwkv7", "rwkv7_mul": "rwkv7_mul"},
}
"""Former folder of a kernel, and of each function in it the former and the public name."""

PLATFORMS = {
    "_xla": "xla",
    "_triton": "triton",
    "_pallas": "pallas",
    "_pallas.tpu": "pallas",
    "_pallas.gpu": "pallas",
    "_cuda": "cuda",
}
"""Former folder of a platform, and the platform."""

_REGISTRY = same_names("ejkernel", ("Backend", "Platform", "kernel_registry"))


def _on(platform: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A public function that runs on one platform unless a call names another."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return function(*args, **{"platform": platform, **options})

    return call


def _platform(folder: str, platform: str) -> FormerModule:
    """The modules of one platform: its own, and one for each folder of a kernel."""
    path = f"{__name__}.{folder}"
    options: dict[str, Any] = {"note": f"(..., platform={platform!r})", "adapt": functools.partial(_on, platform)}
    folders = {kernel: {former: f"ejkernel:{public}" for former, public in names.items()} for kernel, names in FOLDERS.items()}
    for kernel, names in folders.items():
        former_module(f"{path}.{kernel}", names, **options)
    return former_module(path, {name: now for names in folders.values() for name, now in names.items()}, **options)


_MODULES = {folder: _platform(folder, platform) for folder, platform in PLATFORMS.items()}
_xla, _triton, _pallas, _cuda = (_MODULES[folder] for folder in ("_xla", "_triton", "_pallas", "_cuda"))
xla, triton, pallas, cuda = _xla, _triton, _pallas, _cuda
vars(_pallas).update(tpu=_MODULES["_pallas.tpu"], gpu=_MODULES["_pallas.gpu"])
_registry = former_module(f"{__name__}._registry", _REGISTRY)

__all__ = [*_REGISTRY, "cuda", "pallas", "triton", "xla"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _REGISTRY:
        raise AttributeError(f"module 'ejkernel.kernels' has no attribute {name!r}")
    warn(f"ejkernel.kernels.{name} is now ejkernel.{name}", DeprecationWarning)
    return resolve(_REGISTRY[name])
