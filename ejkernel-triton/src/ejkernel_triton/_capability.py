"""What every `supports` here asks first, and what a device has that kernels are sized by."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ejkernel.call import ArraySpec
from ejkernel.plugin import Target
from ejkernel.targets.nvidia import FLOATS, GPU_PROPERTIES, array_problem, device_problem, gpu_properties
from ejkernel_triton._interpret import interpreting
from ejkernel_triton._versions import version_problem

__all__ = ["FLOATS", "multiprocessors", "refusal", "shared_memory_limit"]


def refusal(
    target: Target, specs: Mapping[str, ArraySpec | None], dtypes: Collection[str] | Mapping[str, Collection[str]] = FLOATS
) -> str | None:
    """Why kernels cannot run there or read these arrays, as far as it holds for every kernel; None if nothing is known.

    Args:
        target: of the call.
        specs: the arrays whose dtype matters, by name; absent ones are None.
        dtypes: those that are read, of all arrays or by name.
    """
    if interpreting():
        return (
            array_problem(specs, dtypes) if target.backend == "cpu" else device_problem(target) or array_problem(specs, dtypes)
        )
    return device_problem(target) or array_problem(specs, dtypes) or version_problem()


def shared_memory_limit(target: Target) -> int:
    """Bytes of shared memory that one program may use. The interpreter has no limit; it is given the largest."""
    if target.capability is None:
        return max(gpu.shared_memory for gpu in GPU_PROPERTIES.values())
    return gpu_properties(target).shared_memory


def multiprocessors(target: Target) -> int | None:
    """Of the largest common device of a target's compute capability; None where devices differ too much, or nothing is known."""
    return gpu_properties(target).multiprocessors
