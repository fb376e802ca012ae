"""All that the author of operations imports; `ejkernel.plugin` has what the plugin module beside them needs."""

from __future__ import annotations

from ejkernel._pipeline.arguments import public
from ejkernel._pipeline.operation import Operation
from ejkernel.call import ArraySpec, Bound, Call, Contract, Cost, Request, vary_like
from ejkernel.call.case import Case, Toggle
from ejkernel.errors import invalid, wrong_type
from ejkernel.modules._class_api import class_api
from ejkernel.plugin import Phase
from ejkernel.utils.checks import check_compute, check_shape, finite_number, integer

__all__ = [
    "ArraySpec",
    "Bound",
    "Call",
    "Case",
    "Contract",
    "Cost",
    "Operation",
    "Phase",
    "Request",
    "Toggle",
    "check_compute",
    "check_shape",
    "class_api",
    "finite_number",
    "integer",
    "invalid",
    "public",
    "vary_like",
    "wrong_type",
]
