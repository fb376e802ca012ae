"""The checks that every `supports` here makes first, and the device properties that configs depend on."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ejkernel.call import ArraySpec
from ejkernel.plugin import Target
from ejkernel.targets.nvidia import FLOATS, array_problem, device_problem
from ejkernel_triton._interpret import interpreting
from ejkernel_triton._versions import version_problem

__all__ = ["FLOATS", "multiprocessors", "refusal", "shared_memory_limit"]

_KIB = 1024
_SHARED_MEMORY = {(8, 0): 163 * _KIB, (8, 7): 163 * _KIB, (9, 0): 227 * _KIB, (10, 0): 227 * _KIB, (10, 3): 227 * _KIB}
"""Largest dynamic shared memory of one block (CUDA programming guide, technical specifications per compute capability)."""
_LEAST_SHARED_MEMORY = 99 * _KIB
"""Of 8.6, 8.9 and 12.x; used for capabilities that are not listed."""


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
        return max(_SHARED_MEMORY.values())
    return _SHARED_MEMORY.get(target.capability, _LEAST_SHARED_MEMORY)


_MULTIPROCESSORS = {(8, 0): 108, (9, 0): 132, (10, 0): 148}
"""Of the A100, the SXM parts of the H100 and H200, and the B200."""


def multiprocessors(target: Target) -> int | None:
    """Streaming multiprocessors of the largest common device of the target's compute capability; None if unknown."""
    return None if target.capability is None else _MULTIPROCESSORS.get(target.capability)
