"""Checks that every `supports` of the library's kernels makes first, and the device limits that size the kernels."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ejkernel.call import ArraySpec
from ejkernel.plugin import Target
from ejkernel.targets.nvidia import FLOATS, array_problem, device_problem, gpu_properties
from ejkernel_cuda._library import library_problem

_RESERVED = 1024
"""Bytes of a block's shared memory that handlers reserve."""
TMA_ELEMENTS = 8
"""Of two bytes: TMA needs strides that are multiples of 16 bytes."""
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
    return gpu_properties(target).shared_memory - _RESERVED


def multiprocessors(target: Target) -> int:
    """Multiprocessors of the largest common device of the compute capability; an upper bound where that is unknown."""
    return gpu_properties(target).multiprocessors or _MAX_MULTIPROCESSORS


def padded_head_size(*sizes: int) -> int:
    """The head size that attention kernels are compiled for: 64, 128 or 256."""
    return next((padded for padded in (64, 128) if max(sizes) <= padded), 256)


def largest_pack(group: int) -> int:
    """The most query heads of a key head, of `group`, that share the 64 rows of a consumer warpgroup: a power of two that divides
    both."""
    return min(group & -group, 64)
