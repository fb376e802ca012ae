"""Which calls of `flash_attention` these kernels run."""

from __future__ import annotations

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.plugin import Target
from ejkernel_pallas.tpu.flash_attention import config, tiles

DTYPES = ("float32", "bfloat16")
MAX_OFFSET = 2**29
"""Positions are 32-bit."""
MAX_STREAM_BYTES = 1 << 17
"""Bytes of dropout streams: an eighth of a core's SMEM, of which tile lists may take half."""


def supports(call: FlashAttentionCall, target: Target) -> str | None:
    if target.backend != "tpu":
        return f"needs a TPU, the target is {target}"
    for name in ("query", "key", "value", "bias", "softmax_aux"):
        spec = getattr(call, name)
        if spec is not None and spec.dtype not in DTYPES:
            return f"{name} is {spec.dtype}, needs {' or '.join(DTYPES)}"
    if len({call.query.dtype, call.key.dtype, call.value.dtype}) > 1:
        return (
            f"query, key and value are {call.query.dtype}, {call.key.dtype} and {call.value.dtype}; they must be of one dtype"
        )
    if call.logits_dtype not in DTYPES:
        return f"logits_dtype is {call.logits_dtype}, needs {' or '.join(DTYPES)}"
    streams = 8 * call.query.shape[0] * call.query.shape[2]
    if call.dropout_rate and streams > MAX_STREAM_BYTES:
        return f"dropout needs {streams} bytes of scalar memory for its streams, two words per head, and has {MAX_STREAM_BYTES}"
    if not call.normalize_output:
        return "normalize_output=False: the gradient needs each row's maximum logit, which is not saved"
    if 0 in (*call.query.shape[2:], call.value.shape[3]):
        return f"query has shape {call.query.shape} and value {call.value.shape}, needs heads and head sizes above 0"
    if abs(call.query_offset) > MAX_OFFSET:
        return f"query_offset {call.query_offset} is beyond {MAX_OFFSET}"
    excess = config.fits_smallest(call, target)
    if excess:
        sizes = f"{call.query.shape[3]} and {call.value.shape[3]}"
        return f"heads of size {sizes} need {excess[0]} bytes of VMEM in the smallest tiles, a kernel has {excess[1]}"
    return _too_long(call, target)


def _too_long(call: FlashAttentionCall, target: Target) -> str | None:
    """Refuse calls whose tile lists exceed SMEM, or with more blocks than an entry can encode."""
    if not call.query.size or not call.key.size:
        return None
    most = (tiles.MAX_OTHERS - 1) * config.SMALLEST
    queries, keys = call.query.shape[1], call.key.shape[1]
    if max(queries, keys) > most:
        return f"{max(queries, keys)} tokens are more than {most}"
    longest = config.longest_list(call, config.forward_heuristic(call, target), config.backward_heuristic(call, target))
    if longest > config.MAX_TILES:
        return f"the lists of visible tiles have {longest} entries, scalar memory has room for {config.MAX_TILES}"
    return None
