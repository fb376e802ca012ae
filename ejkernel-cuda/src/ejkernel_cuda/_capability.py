"""What every `supports` of the library's kernels asks first."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ejkernel._arrays import ArraySpec
from ejkernel._capability import FLOATS, array_problem, device_problem
from ejkernel.plugin import Target
from ejkernel_cuda._library import library_problem

__all__ = ["FLOATS", "refusal"]


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
