"""What kernels for NVIDIA GPUs ask of a device and of arrays before all else, in the same words everywhere."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from ejkernel.targets.target import Target


class Spec(Protocol):
    """What is asked of the description of an array."""

    @property
    def dtype(self) -> str: ...


FLOATS = ("float32", "bfloat16", "float16")
HALVES = ("bfloat16", "float16")


def device_problem(target: Target, *, oldest: tuple[int, int] = (8, 0), newest: tuple[int, int] | None = None) -> str | None:
    """Why kernels for these compute capabilities, both ends included, cannot run there; None if they can."""
    if target.backend != "gpu":
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
