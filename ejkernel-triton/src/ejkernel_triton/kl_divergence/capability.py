"""Which calls of `kl_divergence` these kernels run."""

from __future__ import annotations

import math

from ejkernel.operations.kl_divergence.interface import KlDivergenceCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import refusal
from ejkernel_triton.cross_entropy.capability import too_many


def supports_forward(call: KlDivergenceCall, target: Target) -> str | None:
    specs = {name: getattr(call, name) for name in ("student", "teacher", "student_head", "teacher_head")}
    return too_many(math.prod(call.student.shape[:-1]), call.vocabulary) or refusal(target, specs)


supports_backward = supports_forward
