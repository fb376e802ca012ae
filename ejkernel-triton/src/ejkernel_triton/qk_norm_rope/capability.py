"""Which calls of `qk_norm_rope` these kernels run."""

from __future__ import annotations

from ejkernel.operations.qk_norm_rope.interface import QkNormRopeCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import refusal
from ejkernel_triton.rope.capability import MAX_HEAD_SIZE, MAX_TOKENS


def supports_forward(call: QkNormRopeCall, target: Target) -> str | None:
    if call.query.shape[-1] > MAX_HEAD_SIZE:
        return f"head size {call.query.shape[-1]} is above {MAX_HEAD_SIZE}, the widest head that one program holds"
    if (call.query.size == 0) != (call.key.size == 0):
        return f"query {call.query} or key {call.key} has no heads, the other one has"
    heads = [spec.shape[1 if call.heads_first else 2] for spec in (call.query, call.key)]
    tokens = call.query.shape[0] * call.query.shape[2 if call.heads_first else 1]
    if tokens * sum(heads) > MAX_TOKENS:
        return f"{tokens} tokens of {sum(heads)} heads are more than {MAX_TOKENS}"
    specs = {name: getattr(call, name) for name in ("query", "key", "cos", "sin", "query_scale", "key_scale")}
    return refusal(target, specs)


supports_backward = supports_forward
