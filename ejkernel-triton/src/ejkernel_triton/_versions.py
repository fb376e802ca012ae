"""Which versions of jax, jax-triton and Triton are known to work, or not to work, together.

Reads only package metadata and module names, so `supports` imports none of these packages.
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
    """Why the installed versions do not work together, in one sentence; None if no reason is known."""
    versions = installed()
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return f"{' and '.join(missing)} not installed: pip install {' '.join(missing)}"
    if not _has_gpu_support():
        return "jax is installed without its CUDA part, in which jax-triton builds its calls; pip install 'jax[cuda13]'"
    return problem_of({name: str(version) for name, version in versions.items()})


def _has_gpu_support() -> bool:
    """Whether jaxlib's CUDA extension modules are installed; lowering needs them even without a GPU."""
    return any(re.fullmatch(r"jax_cuda\d+_plugin", module.name) for module in pkgutil.iter_modules())


def problem_of(versions: Mapping[str, str]) -> str | None:
    """The problem that core's table of known version combinations lists for these; unlisted combinations are tried."""
    for known in matching(versions):
        if known.verdict == "bad":
            combination = " with ".join(f"{name} {versions[name]}" for name in known.packages)
            return f"{combination} does not work: {known.finding}; {known.remedy}"
    return None
