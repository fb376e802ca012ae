"""What every `supports` of the library's kernels asks first, and what a device has that they are sized by."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ejkernel.call import ArraySpec
from ejkernel.plugin import Target
from ejkernel.targets.nvidia import FLOATS, array_problem, device_problem
from ejkernel_cuda._library import library_problem

_KIB = 1024
_SHARED_MEMORY = {(8, 0): 162 * _KIB, (8, 7): 162 * _KIB, (9, 0): 226 * _KIB, (10, 0): 226 * _KIB, (10, 3): 226 * _KIB}
"""CUDA programming guide, technical specifications per compute capability: most shared memory of one block, less one KiB that
handlers leave alone."""
_LEAST_SHARED_MEMORY = 98 * _KIB
"""Of 8.6, 8.9 and 12.x; taken for capabilities that are not listed."""
_MULTIPROCESSORS = {(8, 0): 108, (9, 0): 132, (10, 0): 148}
"""Of the A100, the SXM parts of the H100 and H200, and the B200."""
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
    return _SHARED_MEMORY.get(target.capability or (0, 0), _LEAST_SHARED_MEMORY)


def multiprocessors(target: Target) -> int:
    """Of the largest common device of a target's compute capability, or more than any has where that is unknown."""
    return _MULTIPROCESSORS.get(target.capability or (0, 0), _MANY_MULTIPROCESSORS)


def head_room(*sizes: int) -> int:
    """Elements that attention makes room for in a head whose keys and values have so many."""
    return next((room for room in (64, 128) if max(sizes) <= room), 256)
