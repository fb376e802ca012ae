"""What every `supports` of the library's kernels asks first, and what a device has that they are sized by."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ejkernel.call import ArraySpec
from ejkernel.plugin import Target
from ejkernel.targets.nvidia import FLOATS, array_problem, device_problem, gpu_properties
from ejkernel_cuda._library import library_problem

_RESERVED = 1024
"""Bytes of a block's shared memory that handlers reserve."""
_MANY_MULTIPROCESSORS = 192
"""More than the devices of other capabilities have that are known."""


def refusal(
    target: Target, specs: Mapping[str, ArraySpec | None], dtypes: Collection[str] | Mapping[str, Collection[str]] = FLOATS
) -> str | None:
    """Why kernels cannot run there or read these arrays, as far as it holds for every kernel; None if nothing is known.

    Args:
        target: of the call.
        specs: the arrays whose dtype matters, by name; absent ones are None.
        dtypes: those that are read, of all arrays or by name.
    """
    return device_problem(target) or array_problem(specs, dtypes) or library_problem()


def shared_memory_limit(target: Target) -> int:
    """Bytes of shared memory that one block may ask for; the least of all where the capability is unknown."""
    return gpu_properties(target).shared_memory - _RESERVED


def multiprocessors(target: Target) -> int:
    """Of the largest common device of a target's compute capability, or more than any has where that is unknown."""
    return gpu_properties(target).multiprocessors or _MANY_MULTIPROCESSORS


def head_room(*sizes: int) -> int:
    """Elements that attention makes room for in a head whose keys and values have so many."""
    return next((room for room in (64, 128) if max(sizes) <= room), 256)
