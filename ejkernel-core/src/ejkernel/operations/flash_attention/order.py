"""The default order of `flash_attention`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import (
    AHEAD_OF_CUDA,
    AHEAD_OF_TRITON,
    BEHIND_MOSAIC_GPU,
    BEHIND_TRITON,
    FIRST,
    TRITON,
    UNMEASURED,
    Priority,
)
from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target

_TIMED_HEADS = ((192, 128), *((size, size) for size in (64, 80, 96, 112, 128, 160, 192, 256)))
_FEWEST_TOKENS = 128
_SHORT = 1024
"""Queries and keys up to which benchmarks/results/orders_h100.json has every platform, without windows, segments or bias."""
_LONGEST_ON_CUDNN = {64: 2048, 128: 2048, 256: 1024}
"""Head size -> queries and keys up to which cuDNN's forward kernel was the fastest; of other sizes as far as was timed."""
_FEW_QUERIES, _MANY_KEYS = 16, 8192
_NARROW_WINDOW = 1024
_FEW_TOKENS_OF_DOCUMENTS = 4096
"""Keys; between 128 and 4096 nothing was timed, and from here on most tiles of a row are seen whole."""
_PACKED_WINDOW = 256
"""Keys; up to here Mosaic GPU's forward kernel packs the heads that share keys."""
_UNTIMED_ATTENTION = {
    "query_positions": "positions",
    "key_positions": "positions",
    "chunk_size": "chunks",
    "prefix": "prefixes",
}


def _attention_on_mosaic_gpu(call: FlashAttentionCall, phase: Phase, target: Target) -> Priority:
    """Phases are chosen apart, as each reads nothing of the other but output and log-sum-exp.

    benchmarks/results: bench_mosaic_gpu_attention_h200.json, orders_mosaic_gpu_h200.json, flash_attention_mosaic_gpu_h200.json,
    bias_mosaic_gpu_h200.json, bench_block_sparse_h100.json, orders_h100.json, bench_cuda_chunks_h200.json,
    orders_grid_attention_h200.json, orders_grid_attention_more_h200.json.
    """
    width = call.window_width
    if few := _few_tokens(call, phase):
        return few
    if _is_chunk(call) and call.query.shape[1] > _FEW_QUERIES:
        return Priority(BEHIND_TRITON, f"over many keys it was faster for up to {_FEW_QUERIES} queries alone")
    if untimed := _untimed_attention(call):
        return Priority(BEHIND_TRITON, f"{untimed} were not timed")
    if width is not None and width < _NARROW_WINDOW:
        if phase == "backward":
            return Priority(BEHIND_TRITON, "gradients under a window of 128 keys took 0.97 ms, Triton's 0.71 ms")
        if not _packs(call) and call.query.shape[3] <= 64:
            return Priority(
                BEHIND_TRITON, "of heads of 64 under a window of 128 keys it was faster where 8 or more share keys alone"
            )
    if few := _few_on_triton(call, phase):
        return few
    few_alone = phase == "forward" and _is_short(call) and call.query.shape[1] < _SHORT and _group(call) == 1
    if few_alone and _is_masked(call) and call.query.shape[3] <= 128:
        return Priority(BEHIND_TRITON, "Triton's was as fast or faster for few tokens under a mask where heads share no keys")
    few_documents = call.query_segments is not None and call.query.shape[1] <= _FEW_TOKENS_OF_DOCUMENTS
    if phase == "forward" and few_documents and call.query.shape[3] <= 64:
        return Priority(BEHIND_TRITON, "Triton's was faster for up to 4096 tokens of documents and heads of 64")
    return Priority(AHEAD_OF_TRITON)


def _attention_on_cuda(call: FlashAttentionCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: bench_cuda_attention_h200.json, flash_attention_cuda_h200.json, bench_cuda_chunks_h200.json,
    orders_h100.json, orders_grid_attention_h200.json, orders_grid_attention_more_h200.json."""
    width = call.window_width
    if few := _few_tokens(call, phase):
        return few
    if untimed := _untimed_attention(call):
        return Priority(BEHIND_TRITON, f"{untimed} were not timed")
    if few := _few_on_triton(call, phase):
        return few
    if call.value.shape[3] < call.query.shape[3]:
        return _narrow_values_on_cuda(call)
    size, sees_all = call.query.shape[3], not call.causal and call.window is None
    narrow = width is not None and width < _NARROW_WINDOW and not _packs(call)
    wide, short = call.value.shape[3] > 128, _is_short(call)
    if short and wide and sees_all:
        return Priority(BEHIND_MOSAIC_GPU, "of few tokens that see all keys, Mosaic GPU's was faster for wide heads")
    ahead = wide or sees_all or _is_chunk(call) or (call.causal and _group(call) == 1) or size in (80, 112)
    if narrow or (ahead and size != 96 and (call.logits_soft_cap is None or short)):
        return Priority(FIRST)
    return Priority(
        BEHIND_MOSAIC_GPU,
        "under a cap, for heads of 96, and of 64 or 128 that share keys under a mask, Mosaic GPU's was as fast or faster",
    )


def _narrow_values_on_cuda(call: FlashAttentionCall) -> Priority:
    """benchmarks/results: orders_h100.json."""
    if call.query.shape[1] < _SHORT and call.causal and call.logits_soft_cap is not None:
        return Priority(FIRST)
    return Priority(BEHIND_MOSAIC_GPU, "Mosaic GPU's was as fast or faster for values narrower than keys")


def _attention_on_cudnn(call: FlashAttentionCall, phase: Phase, target: Target) -> Priority:
    """Its gradients add up in any order, and are refused where that is not allowed.

    benchmarks/results: bench_cuda_attention_h200.json, bench_cuda_chunks_h200.json, bench_mosaic_gpu_attention_h200.json,
    orders_h100.json, orders_grid_attention_h200.json, orders_grid_attention_more_h200.json.
    """
    if few := _few_tokens(call, phase):
        return few
    if phase == "forward":
        if (_is_chunk(call) and call.query.shape[1] == 1) or _fastest_on_cudnn(call):
            return Priority(AHEAD_OF_CUDA)
        return Priority(BEHIND_TRITON, "another kernel was faster")
    if untimed := _untimed_attention(call):
        return Priority(BEHIND_TRITON, f"{untimed} were not timed")
    if call.window is not None or call.value.shape[3] not in (64, 128):
        return Priority(BEHIND_TRITON, "its gradients were timed without windows, with values of 64 and 128")
    return Priority(FIRST)


def _fastest_on_cudnn(call: FlashAttentionCall) -> bool:
    """Forward, of calls without a window, segments, a bias, or values narrower than keys."""
    size, longest = call.query.shape[3], max(call.query.shape[1], call.key.shape[1])
    if not _is_plain(call) or call.logits_soft_cap is not None or call.value.shape[3] != size or _untimed_attention(call):
        return False
    others = (96, 128) if call.causal else (96, 256)
    return size not in others and longest <= _LONGEST_ON_CUDNN.get(size, longest) and (not call.causal or _group(call) >= 4)


def _few_tokens(call: FlashAttentionCall, phase: Phase) -> Priority | None:
    tokens = min(call.query.shape[1], call.key.shape[1])
    fewest = _FEWEST_TOKENS if _is_short(call) or _packs(call) else _SHORT
    if tokens >= fewest or (phase == "forward" and _is_chunk(call)):
        return None
    return Priority(UNMEASURED, f"{tokens} tokens, fewer than {fewest}, were not timed")


def _is_plain(call: FlashAttentionCall) -> bool:
    return call.window is None and call.query_segments is None and call.bias is None


def _is_short(call: FlashAttentionCall) -> bool:
    return _is_plain(call) and max(call.query.shape[1], call.key.shape[1]) <= _SHORT


def _is_masked(call: FlashAttentionCall) -> bool:
    return call.causal or call.logits_soft_cap is not None


def _group(call: FlashAttentionCall) -> int:
    """Query heads that share a key head."""
    return call.query.shape[2] // call.key.shape[2]


def _few_on_triton(call: FlashAttentionCall, phase: Phase) -> Priority | None:
    """Behind Triton, for a few tokens with heads of 64 under a causal mask or a cap (gradients only where heads do not share keys,
    and in sequences of 1024 they take as long on Mosaic GPU), and forward with values narrower than keys under a causal mask."""
    few = call.query.shape[1] <= _SHORT if phase == "forward" else call.query.shape[1] <= _SHORT // 2 and _group(call) == 1
    narrow = call.query.shape[3] <= (80 if phase == "forward" else 64)
    if _is_short(call) and few and _is_masked(call) and narrow:
        return Priority(BEHIND_TRITON, "Triton's was faster for few tokens with narrow heads under a mask")
    narrow_values = call.value.shape[3] < call.query.shape[3] and call.query.shape[1] < _SHORT
    if phase == "forward" and narrow_values and call.causal and call.logits_soft_cap is None:
        return Priority(BEHIND_TRITON, "Triton's was as fast or faster for few tokens with values narrower than keys")
    return None


def _is_chunk(call: FlashAttentionCall) -> bool:
    """A few queries over as many keys as were timed with them."""
    return call.query.shape[1] < _SHORT and call.key.shape[1] >= _MANY_KEYS and call.window is None


def _packs(call: FlashAttentionCall) -> bool:
    """Whether Mosaic GPU's forward kernel has the query heads of a key head as rows, under a narrow window."""
    group, width = _group(call), call.window_width
    return width is not None and width <= _PACKED_WINDOW and group % 8 == 0 and 64 % group == 0 and call.query_segments is None


def _untimed_attention(call: FlashAttentionCall) -> str:
    """What of a call is far from all that was timed; empty if nothing is."""
    size, value_size = call.query.shape[3], call.value.shape[3]
    if (size, value_size) not in _TIMED_HEADS:
        return f"heads of {size} with values of {value_size}"
    return next((what for field, what in _UNTIMED_ATTENTION.items() if getattr(call, field) is not None), "")


ORDER: Mapping[str, Mapping[str, int | Rule]] = {
    "gpu": {
        "triton": TRITON,
        "pallas.mosaic_gpu": _attention_on_mosaic_gpu,
        "cuda": _attention_on_cuda,
        "cuda.cudnn": _attention_on_cudnn,
    }
}
"""benchmarks/results/bench_h200.json: Triton's forward 5 to 21 times as fast as XLA in bfloat16, backward 2.2 to 15 times; forward
in float32 3.3 times (bench_float32_h200.json)."""
