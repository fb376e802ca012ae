"""Entry point to `selective_scan` beside its own: step sizes as the model projects them."""

from __future__ import annotations

from typing import Any

from ejkernel.call.records import Bound
from ejkernel.operations.common.packed import taking_part, zero_outside
from ejkernel.operations.common.step_sizes import step_sizes
from ejkernel.operations.selective_scan.interface import OPERATION
from ejkernel.utils.checks import check_compute, check_shape


def scan(*, x: Any, dt: Any, dt_bias: Any, dt_softplus: bool, **arrays: Any) -> Bound:
    """Canonicalise Mamba's scan with the step sizes that its kernel computes."""
    check_compute("x", x, ndim=3)
    check_compute("dt", dt)
    check_shape("dt", dt, x.shape, "[B, T, I] as x")
    part = taking_part(arrays["seg_ids"], arrays["cu_seqlens"], x, "x")
    if part is not None and (dt_bias is not None or dt_softplus):
        (dt,) = zero_outside(part, dt)
    return OPERATION.canonicalise(x, dt=step_sizes(dt, dt_bias, dt_softplus, x, "I"), **arrays)
