"""The checks that every `supports` here makes first, and the device properties that configs depend on."""

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
    """Why no kernel here can run on the target or read these arrays; None if no such reason is known.

    Args:
        target: of the call.
        specs: arrays whose dtype is checked, by name; absent ones are None.
        dtypes: supported dtypes, of all arrays or by name.
    """
    if interpreting():
        return (
            array_problem(specs, dtypes) if target.backend == "cpu" else device_problem(target) or array_problem(specs, dtypes)
        )
    return device_problem(target) or array_problem(specs, dtypes) or version_problem()


def shared_memory_limit(target: Target) -> int:
    """Bytes of shared memory that one program may use. The interpreter has no limit and gets the largest."""
    if target.capability is None:
        return max(gpu.shared_memory for gpu in GPU_PROPERTIES.values())
    return gpu_properties(target).shared_memory


def multiprocessors(target: Target) -> int | None:
    """Streaming multiprocessors of the largest common device of the target's compute capability; None if unknown."""
    return gpu_properties(target).multiprocessors
