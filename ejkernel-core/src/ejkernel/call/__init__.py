"""One invocation as data: what the code of a plugin reads of a call. `ejkernel.plugin` has the records that describe a plugin."""

from __future__ import annotations

from ejkernel.call.arrays import ArraySpec, Dim, has_gradient, known_size, named, parse_dims, statistics_dtype
from ejkernel.call.contract import Contract
from ejkernel.call.partition import vary_like
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.call.request import Request

__all__ = [
    "ArraySpec",
    "Bound",
    "Call",
    "Contract",
    "Cost",
    "Dim",
    "Request",
    "has_gradient",
    "known_size",
    "named",
    "parse_dims",
    "statistics_dtype",
    "vary_like",
]
