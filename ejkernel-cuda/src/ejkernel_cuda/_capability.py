"""Checks that every `supports` of the library's kernels makes first, and the device limits that size the kernels."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ejkernel.call import ArraySpec
from ejkernel.plugin import Target
from ejkernel.targets.nvidia import FLOATS, array_problem, device_problem
from ejkernel_cuda._library import library_problem

_KIB = 1024
_SHARED_MEMORY = {(8, 0): 162 * _KIB, (8, 7): 162 * _KIB, (9, 0): 226 * _KIB, (10, 0): 226 * _KIB, (10, 3): 226 * _KIB}
"""CUDA programming guide, technical specifications per compute capability: maximum shared memory per block, less one KiB that
handlers reserve."""
_MIN_SHARED_MEMORY = 98 * _KIB
"""Of 8.6, 8.9 and 12.x; assumed for capabilities that are not listed."""
_MULTIPROCESSORS = {(8, 0): 108, (9, 0): 132, (10, 0): 148}
"""Of the A100, the SXM parts of the H100 and H200, and the B200."""
_MAX_MULTIPROCESSORS = 192
"""More than any known device of another capability has."""


def refusal(
    target: Target, specs: Mapping[str, ArraySpec | None], dtypes: Collection[str] | Mapping[str, Collection[str]] = FLOATS
) -> str | None:
    """Why no kernel of the library can run there or read these arrays; None if nothing speaks against it.

    Args:
        target: of the call.
        specs: the arrays whose dtype is checked, by name; absent ones are None.
        dtypes: the supported ones, of all arrays or by name.
    """
    return device_problem(target) or array_problem(specs, dtypes) or library_problem()


def shared_memory_limit(target: Target) -> int:
    """Bytes of dynamic shared memory per block; the minimum of all devices where the capability is unknown."""
    return _SHARED_MEMORY.get(target.capability or (0, 0), _MIN_SHARED_MEMORY)


def multiprocessors(target: Target) -> int:
    """Multiprocessors of the largest common device of the compute capability; an upper bound where that is unknown."""
    return _MULTIPROCESSORS.get(target.capability or (0, 0), _MAX_MULTIPROCESSORS)


def padded_head_size(*sizes: int) -> int:
    """The head size that attention kernels are compiled for: 64, 128 or 256."""
    return next((padded for padded in (64, 128) if max(sizes) <= padded), 256)
