"""`jax.lax.ragged_dot`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ejkernel_bench._program import Function
from ejkernel_bench.peers._peer import Peer, beyond


def _ragged_dot(call: Any, inputs: Any) -> Function | str:
    reason = beyond(call, "lhs", "rhs", "group_sizes", "transpose_rhs", "preferred_element_type", "precision")
    if reason or call.lhs.shape[0] != 1:
        return reason or "does not do a batch"

    def grouped(inputs: Any) -> Mapping[str, Any]:
        rhs = inputs.rhs[0].swapaxes(1, 2) if call.transpose_rhs else inputs.rhs[0]
        sizes, dtype = inputs.group_sizes[0], call.preferred_element_type
        out = jax.lax.ragged_dot(inputs.lhs[0], rhs, sizes, precision=call.precision, preferred_element_type=dtype)
        return {"out": out[None]}

    return grouped


PEERS = (Peer("lax.ragged_dot", {"grouped_matmul": _ragged_dot}),)
