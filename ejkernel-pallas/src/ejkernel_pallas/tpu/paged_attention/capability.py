"""Which calls of `paged_attention` this kernel runs."""

from __future__ import annotations

from ejkernel.operations.paged_attention.interface import PagedAttentionCall
from ejkernel.plugin import Target
from ejkernel_pallas.tpu._pages import STORED
from ejkernel_pallas.tpu._vmem import memory_of
from ejkernel_pallas.tpu.paged_attention.config import heuristic, smallest, vmem_bytes
from ejkernel_pallas.tpu.paged_attention.schedule import max_items

DTYPES = ("float32", "bfloat16")


def supports(call: PagedAttentionCall, target: Target) -> str | None:
    if target.backend != "tpu":
        return f"needs a TPU, the target is {target}"
    for name in ("query", "key_pages", "value_pages", "softmax_aux", "alibi_slopes", "qq_bias", "key_scale", "value_scale"):
        spec, wanted = getattr(call, name), STORED if name.endswith("_pages") else DTYPES
        if spec is not None and spec.dtype not in wanted:
            return f"{name} is {spec.dtype}, needs {' or '.join(wanted)}"
    memory = memory_of(target)
    needed = vmem_bytes(call, smallest(call))
    if needed > memory.vmem:
        return f"a step of {smallest(call).pages_per_block} pages takes {needed} bytes of VMEM, above {memory.vmem}"
    numbers, room = scalars(call, heuristic(call, target).block_q), memory.smem_numbers
    if numbers > room:
        return f"block tables and work items are {numbers} numbers, at most {room} fit into SMEM"
    return None


def scalars(call: PagedAttentionCall, tile: int) -> int:
    """32-bit scalars in SMEM."""
    batch, tokens = call.query.shape[:2]
    requests = call.kv_lens.shape[1]
    items = 4 * max_items(batch, tokens, requests, tile)
    return items + call.block_tables.size + 4 * batch * requests + 2 * batch * call.heads
