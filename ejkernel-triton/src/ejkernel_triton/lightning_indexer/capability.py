"""Which calls of `lightning_indexer` these kernels run."""

from __future__ import annotations

from ejkernel.operations.lightning_indexer.interface import FLOAT8, LightningIndexerCall
from ejkernel.plugin import Target
from ejkernel_triton._capability import FLOATS, refusal
from ejkernel_triton._pages import e4m3_problem

MAX_CHANNELS = 256
MAX_TOKENS = 2**24
MAX_QUERIES = 2**22
"""Of all members of the batch."""


def supports_forward(call: LightningIndexerCall, target: Target) -> str | None:
    batch, queries, _, size = call.query.shape
    tokens = call.key.shape[1]
    if size > MAX_CHANNELS:
        return f"{size} channels are above {MAX_CHANNELS}, the most that one program holds"
    if tokens > MAX_TOKENS:
        return f"{tokens} tokens are above {MAX_TOKENS}"
    if batch * queries > MAX_QUERIES:
        return f"{batch * queries} queries are above {MAX_QUERIES}"
    specs = {"query": call.query, "key": call.key}
    return e4m3_problem(target, *specs.values()) or refusal(target, specs, (*FLOATS, FLOAT8))
