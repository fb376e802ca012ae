"""What kernels for NVIDIA GPUs ask of a device and of arrays before all else, in the same words everywhere, and the properties of
devices that kernels are sized by."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Protocol

from ejkernel.targets.target import Target


class Spec(Protocol):
    """What is asked of the description of an array."""

    @property
    def dtype(self) -> str: ...


FLOATS = ("float32", "bfloat16", "float16")
HALVES = ("bfloat16", "float16")

_KIB = 1024


@dataclasses.dataclass(frozen=True)
class GpuProperties:
    """Properties of the devices of one compute capability.

    Attributes:
        shared_memory: bytes of shared memory that one thread block may have at most, opt-in dynamic shared memory included (CUDA
            C++ programming guide, technical specifications per compute capability).
        multiprocessors: streaming multiprocessors of the largest common device (NVIDIA's data sheets); None where devices differ
            too much or are not known.
    """

    shared_memory: int
    multiprocessors: int | None = None


HOPPER_MULTIPROCESSORS = 132
"""Of the SXM parts of the H100 and H200."""
FEWER_MULTIPROCESSORS = {"H20": 78, "PCIe": 114}
"""Of other devices of compute capability 9.0, by a word of their name: the H20 and the H100 PCIe."""
GPU_PROPERTIES = {
    (8, 0): GpuProperties(163 * _KIB, 108),  # A100
    (8, 7): GpuProperties(163 * _KIB),
    (9, 0): GpuProperties(227 * _KIB, HOPPER_MULTIPROCESSORS),
    (10, 0): GpuProperties(227 * _KIB, 148),  # B200
    (10, 3): GpuProperties(227 * _KIB),
}
"""By compute capability."""
OTHER_GPU = GpuProperties(99 * _KIB)
"""Of 8.6, 8.9 and 12.x, which have the least shared memory since 8.0; assumed for capabilities that are not listed."""


def gpu_properties(target: Target) -> GpuProperties:
    """Of the target's compute capability; `OTHER_GPU` where that is unknown or not listed.

    A platform that leaves part of the shared memory alone, or that has a better guess for an unknown device, says so itself.
    """
    return OTHER_GPU if target.capability is None else GPU_PROPERTIES.get(target.capability, OTHER_GPU)


def device_problem(target: Target, *, oldest: tuple[int, int] = (8, 0), newest: tuple[int, int] | None = None) -> str | None:
    """Why kernels for these compute capabilities, both ends included, cannot run there; None if they can."""
    if target.backend != "gpu" or target.is_amd:
        return f"needs an NVIDIA GPU, the target is {target}"
    if target.capability is None:
        return f"the compute capability of {target} is unknown; say it with ejkernel.use(target=Target('gpu', ..., '9.0'))"
    if target.capability < oldest or (newest is not None and target.capability > newest):
        admitted = " or newer" if newest is None else "" if newest == oldest else f" to {newest[0]}.{newest[1]}"
        return f"needs compute capability {oldest[0]}.{oldest[1]}{admitted}, {target} has {target.compute_capability}"
    return None


def array_problem(
    specs: Mapping[str, Spec | None], dtypes: Collection[str] | Mapping[str, Collection[str]] = FLOATS
) -> str | None:
    """The first array whose dtype is not read; None if all are.

    Args:
        specs: the arrays whose dtype matters, by name; absent ones are None.
        dtypes: those that are read, of all arrays or by name.
    """
    for name, spec in specs.items():
        admitted = dtypes[name] if isinstance(dtypes, Mapping) else dtypes
        if spec is not None and spec.dtype not in admitted:
            return f"{name} is {spec.dtype}, needs {', '.join(admitted)}"
    return None
