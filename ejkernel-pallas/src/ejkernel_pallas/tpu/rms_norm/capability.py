"""Which calls of `rms_norm` these kernels run."""

from __future__ import annotations

from ejkernel.operations.rms_norm.interface import RmsNormCall
from ejkernel.plugin import Target

DTYPES = ("float32", "bfloat16")
WIDEST = 32768
"""The smallest tile, 16 whole rows with their float32 copies, must fit into 16 MiB of VMEM."""


def supports(call: RmsNormCall, target: Target) -> str | None:
    if target.backend != "tpu":
        return f"needs a TPU, the target is {target}"
    for name in ("x", "scale", "offset"):
        spec = getattr(call, name)
        if spec is not None and spec.dtype not in DTYPES:
            return f"{name} is {spec.dtype}, needs {' or '.join(DTYPES)}"
    if call.x.shape[-1] > WIDEST:
        return f"width {call.x.shape[-1]} is above {WIDEST}, of which 16 rows fit into VMEM"
    return None
