"""What Mosaic GPU kernels need of a device and of the installed jax, and what there is of shared memory.

`supports` and configs import this module and no kernel, and so not Mosaic GPU, whose import takes a second.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import os
import pkgutil
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from ejkernel.call import ArraySpec
from ejkernel.plugin import Target
from ejkernel.targets.nvidia import GPU_PROPERTIES, HALVES, array_problem, device_problem
from ejkernel_pallas._jax_interpreter import gpu_interpreter_is_on

CAPABILITY = (9, 0)
SHARED_MEMORY = GPU_PROPERTIES[CAPABILITY].shared_memory
"""Bytes of shared memory of one block."""
ALIGNMENT = 1024
"""Alignment of the arrays that Pallas allocates in shared memory."""
SHARED_MEMORY_SLACK = 1024
"""Bytes left for mbarriers."""

_NEEDED = ("kernel", "wgmma_accumulator_load", "broadcasted_iota", "warp_map", "layout_cast")
"""Names that kernels use from `jax.experimental.pallas.mosaic_gpu`; missing before jax 0.11."""


def refusal(target: Target, specs: Mapping[str, ArraySpec | None], dtypes: Sequence[str] = HALVES) -> str | None:
    """Why no kernel here can run on the target or read these arrays; None if no such reason is known.

    Args:
        target: of the call.
        specs: input arrays by name; absent ones are None.
        dtypes: supported dtypes.
    """
    problem = device_problem(target, oldest=CAPABILITY, newest=CAPABILITY) or array_problem(specs, dtypes)
    return problem or (None if gpu_interpreter_is_on() else version_problem())


@functools.cache
def version_problem() -> str | None:
    """What the installed jax lacks, in one sentence; None if nothing is known to be missing."""
    if not any(re.fullmatch(r"jax_cuda\d+_plugin", module.name) for module in pkgutil.iter_modules()):
        return "jax is installed without its CUDA part, in which Mosaic GPU kernels are lowered; pip install 'jax[cuda13]'"
    names = _names_of_mosaic_gpu()
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        return f"Pallas Mosaic GPU of jax {jax.__version__} has no {' and no '.join(missing)}; jax 0.11 has"
    return None


def _names_of_mosaic_gpu() -> set[str]:
    """Read from its source: importing it takes a second, which a call that runs on another platform need not wait for."""
    source = Path(str(jax.__file__)).parent / "experimental" / "pallas" / "mosaic_gpu.py"
    body = ast.parse(source.read_bytes()).body if source.is_file() else []
    return {alias.asname or alias.name for each in body if isinstance(each, ast.ImportFrom) for alias in each.names}


def lowered_from() -> str | None:
    """What lowered kernels depend on beside the version of jax; None in the interpreter."""
    importlib.import_module("jax.experimental.mosaic.gpu")  # registers the custom call

    if gpu_interpreter_is_on():
        return None
    switches = {name: value for name, value in os.environ.items() if name.startswith(("MOSAIC_GPU_", "JAX_PALLAS_"))}
    return repr((_cuda_versions(), sorted(switches.items())))


@functools.cache
def _cuda_versions() -> list[tuple[str, str]]:
    """The installed CUDA parts of JAX, in which Mosaic GPU's passes are."""
    names = (module.name for module in pkgutil.iter_modules() if re.fullmatch(r"jax_cuda\d+_plugin", module.name))
    return [(name, importlib.metadata.version(name.replace("_", "-"))) for name in sorted(names)]


def smem_bytes(shape: tuple[int, ...], itemsize: int = 2) -> int:
    """Bytes of shared memory of such an array, or of an untiled one."""
    size = itemsize
    for extent in shape:
        size *= extent
    return -(-size // ALIGNMENT) * ALIGNMENT
