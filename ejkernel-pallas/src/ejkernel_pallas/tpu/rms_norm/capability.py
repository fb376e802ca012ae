"""Which calls of `rms_norm` these kernels run."""

from __future__ import annotations

from ejkernel.operations.rms_norm.interface import RmsNormCall
from ejkernel.plugin import Target

DTYPES = ("float32", "bfloat16")
WIDEST = {"float32": 16384, "bfloat16": 32768}
"""The smallest tile, 16 whole rows with float32 copies, must fit in 16 MiB, the default VMEM limit of v4 and v5e."""


def supports(call: RmsNormCall, target: Target) -> str | None:
    if target.backend != "tpu":
        return f"needs a TPU, the target is {target}"
    for name in ("x", "scale", "offset"):
        spec = getattr(call, name)
        if spec is not None and spec.dtype not in DTYPES:
            return f"{name} is {spec.dtype}, needs {' or '.join(DTYPES)}"
    widest = WIDEST[call.x.dtype]
    if call.x.shape[-1] > widest:
        return f"width {call.x.shape[-1]} is above {widest}, the widest {call.x.dtype} row of which 16 fit into VMEM"
    return None
