"""Which calls of `paged_cache_update` these kernels run."""

from __future__ import annotations

from ejkernel.operations.paged_cache_update.interface import PagedCacheUpdateCall
from ejkernel.plugin import Target
from ejkernel_pallas.tpu._pages import STORED, sources
from ejkernel_pallas.tpu._vmem import memory_of
from ejkernel_pallas.tpu.paged_cache_update.config import (
    SLOTS,
    Config,
    chunk_rows,
    heuristic,
    vmem_bytes,
)
from ejkernel_pallas.tpu.paged_cache_update.schedule import max_chunks

SCALES = ("float32", "bfloat16")


def supports(call: PagedCacheUpdateCall, target: Target) -> str | None:
    if target.backend != "tpu":
        return f"needs a TPU, the target is {target}"
    for name in ("key", "value", "key_pages", "value_pages", "key_scale", "value_scale"):
        spec, wanted = getattr(call, name), SCALES if name.endswith("_scale") else STORED
        if spec is not None and spec.dtype not in wanted:
            return f"{name} is {spec.dtype}, needs {' or '.join(wanted)}"
    memory = memory_of(target)
    needed = vmem_bytes(call, Config(SLOTS[0]))
    if needed > memory.vmem:
        return f"{SLOTS[0]} tokens take {needed} bytes of VMEM, above {memory.vmem}"
    numbers, room = scalars(call, heuristic(call, target)), memory.smem_numbers
    if numbers > room:
        return f"the slots of {call.key.shape[1]} tokens are {numbers} numbers, at most {room} fit into SMEM"
    return None


def scalars(call: PagedCacheUpdateCall, config: Config) -> int:
    """32-bit scalars in SMEM."""
    batch, tokens = call.key.shape[:2]
    if sources(call)[0].token_major:
        return 3 * batch * -(-tokens // config.slots) * config.slots
    return 5 * (max_chunks(batch, tokens, call.kv_lens.shape[1], chunk_rows(call)) + config.slots)
