"""Which versions of jax, jax-triton and Triton are known to work, or not to work, together.

Reads package metadata and looks for modules only, so that `supports` can ask without importing any of them.
"""

from __future__ import annotations

import functools
import importlib.metadata
import pkgutil
import re
from collections.abc import Mapping

from ejkernel.utils.known_versions import matching


@functools.cache
def installed() -> dict[str, str | None]:
    """Versions of the three packages; None where one is not installed."""
    return {name: _version(name) for name in ("jax", "jax-triton", "triton")}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def version_problem() -> str | None:
    """One sentence saying why the installed versions cannot work together; None if no reason is known."""
    versions = installed()
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return f"{' and '.join(missing)} not installed: pip install {' '.join(missing)}"
    if not _has_gpu_support():
        return "jax is installed without its CUDA part, in which jax-triton builds its calls; pip install 'jax[cuda13]'"
    return problem_of({name: str(version) for name, version in versions.items()})


def _has_gpu_support() -> bool:
    """Whether jaxlib's extension modules for CUDA are there; calls are built with them on a machine without a GPU too."""
    return any(re.fullmatch(r"jax_cuda\d+_plugin", module.name) for module in pkgutil.iter_modules())


def problem_of(versions: Mapping[str, str]) -> str | None:
    """What core's table of measured combinations says of these versions; those that it does not hold are tried."""
    for known in matching(versions):
        if known.verdict == "bad":
            combination = " with ".join(f"{name} {versions[name]}" for name in known.packages)
            return f"{combination} does not work: {known.finding}; {known.remedy}"
    return None
