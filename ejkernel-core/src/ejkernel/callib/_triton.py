"""`triton_call`: jax-triton's, imported when it is first called."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from typing import Any

import importlib_metadata

from ejkernel.utils.known_versions import matching

_CACHE_VARIABLE = "TRITON_CACHE_DIR"


def triton_call(*args: Any, kernel: Any, out_shape: Any, grid: Any, **options: Any) -> Any:
    """Call a Triton kernel of one's own on a GPU: `jax_triton.triton_call`.

    Such a call has no gradient and no batching rule; a function around it that shall have them is registered with
    `kernel_registry.register` under the name of an operation.

    Args:
        *args: arrays and scalars, in the order of the kernel's parameters.
        kernel: a `triton.jit` function.
        out_shape: shape and dtype of each output.
        grid: programs along each axis, or a function of the constants.
        **options: the other arguments of `jax_triton.triton_call`, and the kernel's constants.

    Returns:
        The outputs, as `out_shape` is built.

    Raises:
        ImportError: jax-triton is not installed, or not in a version that works with this jax.
    """
    return _jax_triton().triton_call(*args, kernel=kernel, out_shape=out_shape, grid=grid, **options)


@functools.cache
def _jax_triton() -> Any:
    """jax-triton, whose import overwrites a variable of Triton's in the environment: the user's value is put back."""
    for known in matching(_installed()):
        if known.verdict == "bad":
            raise ImportError(f"triton_call: {known.finding}; {known.remedy}")
    before = os.environ.get(_CACHE_VARIABLE)
    try:
        return importlib.import_module("jax_triton")
    except ModuleNotFoundError as error:
        raise ImportError(f"triton_call: {error.name} is not installed; pip install ejkernel-triton") from error
    finally:
        if before is None:
            os.environ.pop(_CACHE_VARIABLE, None)
        else:
            os.environ[_CACHE_VARIABLE] = before


def _installed() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in ("jax", "jax-triton", "triton"):
        with contextlib.suppress(importlib_metadata.PackageNotFoundError):
            versions[name] = importlib_metadata.version(name)
    return versions
