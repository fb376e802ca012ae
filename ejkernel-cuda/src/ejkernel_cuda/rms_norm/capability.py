"""Which calls of `rms_norm` these kernels run."""

from __future__ import annotations

from ejkernel.operations.rms_norm.interface import RmsNormCall
from ejkernel.plugin import Target
from ejkernel_cuda._library import library_problem

DTYPES = ("float32", "bfloat16", "float16")
OLDEST = (8, 0)
WIDEST = 1 << 30
"""Columns are counted in 32 bits; rows and elements in 64."""


def supports_forward(call: RmsNormCall, target: Target) -> str | None:
    if target.backend != "gpu":
        return f"needs an NVIDIA GPU, the target is {target}"
    if target.capability is None:
        return f"the compute capability of {target} is unknown; say it with ejkernel.use(target=Target('gpu', ..., '9.0'))"
    if target.capability < OLDEST:
        return f"needs compute capability {OLDEST[0]}.{OLDEST[1]} or newer, {target} has {target.compute_capability}"
    for name in ("x", "scale", "offset"):
        spec = getattr(call, name)
        if spec is not None and spec.dtype not in DTYPES:
            return f"{name} is {spec.dtype}, needs {', '.join(DTYPES)}"
    if call.x.shape[-1] > WIDEST:
        return f"width {call.x.shape[-1]} is above {WIDEST}"
    return library_problem()


supports_backward = supports_forward
