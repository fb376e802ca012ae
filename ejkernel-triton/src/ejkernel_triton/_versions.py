"""Which versions of jax, jax-triton and Triton are known to work, or not to work, together.

Reads package metadata and looks for modules only, so that `supports` can ask without importing any of them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import pkgutil
import re

from packaging.specifiers import SpecifierSet


@dataclasses.dataclass(frozen=True)
class Pair:
    """What is known of one combination: specifiers, and the problem (empty = works)."""

    jax: str
    jax_triton: str
    problem: str = ""


PAIRS = (
    Pair(jax="==0.10.2", jax_triton="==0.3.1"),
    Pair(jax="==0.11.*", jax_triton="==0.3.1"),
    Pair(jax="==0.12.0.1", jax_triton="==0.3.1"),
    Pair(
        jax=">=0.12",
        jax_triton=">=0.4,<=0.4.1",
        problem="its calls fail while JAX lowers them; pip install jax-triton==0.3.1",
    ),
)
"""The first entry that fits speaks; a combination without one is tried."""


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
    return problem_of(str(versions["jax"]), str(versions["jax-triton"]))


def _has_gpu_support() -> bool:
    """Whether jaxlib's extension modules for CUDA are there; calls are built with them on a machine without a GPU too."""
    return any(re.fullmatch(r"jax_cuda\d+_plugin", module.name) for module in pkgutil.iter_modules())


def problem_of(jax: str, jax_triton: str) -> str | None:
    """What the table says of one pair of versions."""
    for pair in PAIRS:
        if _fits(jax, pair.jax) and _fits(jax_triton, pair.jax_triton):
            return f"jax-triton {jax_triton} does not work with jax {jax}: {pair.problem}" if pair.problem else None
    return None


def _fits(version: str, specifier: str) -> bool:
    return SpecifierSet(specifier).contains(version, prereleases=True)
