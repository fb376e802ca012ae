"""What every `supports` here asks first."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ejkernel._arrays import ArraySpec
from ejkernel.plugin import Target
from ejkernel_cuda._library import library_problem

OLDEST = (8, 0)
FLOATS = ("float32", "bfloat16", "float16")


def refusal(
    target: Target, specs: Mapping[str, ArraySpec | None], dtypes: Collection[str] | Mapping[str, Collection[str]] = FLOATS
) -> str | None:
    """Why kernels of the library cannot run there or read these arrays, as far as it holds for every kernel; None if nothing is
    known.

    Args:
        target: of the call.
        specs: the arrays whose dtype matters, by name; absent ones are None.
        dtypes: those that are read, of all arrays or by name.
    """
    return device_problem(target) or array_problem(specs, dtypes) or library_problem()


def device_problem(target: Target) -> str | None:
    """Why nothing of this platform runs there; None if nothing is known."""
    if target.backend != "gpu":
        return f"needs an NVIDIA GPU, the target is {target}"
    if target.capability is None:
        return f"the compute capability of {target} is unknown; say it with ejkernel.use(target=Target('gpu', ..., '9.0'))"
    if target.capability < OLDEST:
        return f"needs compute capability {OLDEST[0]}.{OLDEST[1]} or newer, {target} has {target.compute_capability}"
    return None


def array_problem(specs: Mapping[str, ArraySpec | None], dtypes: Collection[str] | Mapping[str, Collection[str]]) -> str | None:
    """The first array whose dtype is not read; None if there is none."""
    for name, spec in specs.items():
        admitted = dtypes[name] if isinstance(dtypes, Mapping) else dtypes
        if spec is not None and spec.dtype not in admitted:
            return f"{name} is {spec.dtype}, needs {', '.join(admitted)}"
    return None
