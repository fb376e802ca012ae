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

_TIMED_HEADS = ((64, 64), (128, 128), (192, 128), (256, 256))
_FEWEST_TOKENS = 256
_SHORT = 1024
"""Queries and keys up to which benchmarks/results/orders_h100.json has every platform, without windows, segments or bias."""
_FEW_QUERIES, _MANY_KEYS = 16, 8192
_NARROW_WINDOW = 1024
_FEW_TOKENS_OF_DOCUMENTS = 4096
"""Keys; between 128 and 4096 nothing was timed, and from here on most tiles of a row are seen whole."""
_PACKED_WINDOW = 256
"""Keys; up to here Mosaic GPU's forward kernel packs the heads that share keys."""
_UNTIMED_ATTENTION = {
    "softmax_aux": "sinks",
    "query_positions": "positions",
    "key_positions": "positions",
    "chunk_size": "chunks",
    "prefix": "prefixes",
}


def _attention_on_mosaic_gpu(call: FlashAttentionCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/bench_mosaic_gpu_attention_h200.json, orders_mosaic_gpu_h200.json (D192/128, the cap),
    flash_attention_mosaic_gpu_h200.json (segments) and bias_mosaic_gpu_h200.json (gradients under a bias of keys), ms at B2 T8192
    unless said:

    H32/8 D128 causal                   forward 1.62, Triton 2.12    backward 5.48, Triton 6.54
    H16 D128 causal                     forward 0.873, Triton 1.16   backward 2.79, Triton 3.53
    H16 D128                            forward 1.56, Triton 2.15    backward 5.23, Triton 6.45
    H32 D64                             forward 2.03, Triton 2.47    backward 6.49, Triton 6.96
    H16/8 D128 window 4096 soft cap     forward 0.781, Triton 1.56   backward 2.50, Triton 3.98
    H16/8 D256 window 4096 soft cap     forward 1.15, Triton 2.21    backward 7.24, Triton 10.1
    H16 D192/128 causal                 forward 1.04, Triton 1.88    backward 4.27, Triton 9.15
    H16/4 D128 causal T32768 8 segments forward 1.01, Triton 1.36    backward 3.22, Triton 4.55
    H8/2 D64 causal T4096 4 segments    forward 0.066, Triton 0.044 (bench_block_sparse_h100.json, with backward 0.158, 0.179)
    H64/8 D64 window 128                forward 0.203, Triton 0.286  backward 0.969, Triton 0.712
    H16 D128 causal, bias `[1,1,T,T]`   forward 1.23, Triton 1.76    backward 5.30, Triton 9.78
    H16 D128 causal, bias of keys       forward 1.00, Triton 1.72    backward 4.71

    and of 4096 tokens in sequences of 256, 512 and 1024 (orders_h100.json, us): H32/8 D128 causal forward 49, 62, 83, Triton 67,
    81, 114, backward 185, 226, 302, Triton 206, 254, 344; H16 D192/128 backward 200, 223, 279, Triton 247, 315, 441; H32 D64 causal
    forward 88, 79, 98, Triton 46, 55, 76, backward 152, 174, 221, Triton 133, 159, 218.

    Phases are chosen apart, as each reads nothing of the other but output and log-sum-exp. Long calls took XLA at least twice as
    long in every case. A few queries over many keys are in bench_cuda_chunks_h200.json, below.
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
        if not _packs(call):
            return Priority(BEHIND_TRITON, "under a window of 128 keys it was faster where 8 heads or more share keys alone")
    if few := _few_on_triton(call, phase):
        return few
    few_documents = call.query_segments is not None and call.query.shape[1] <= _FEW_TOKENS_OF_DOCUMENTS
    if phase == "forward" and few_documents and call.query.shape[3] <= 64:
        return Priority(BEHIND_TRITON, "Triton's was faster for up to 4096 tokens of documents and heads of 64")
    return Priority(AHEAD_OF_TRITON)


def _attention_on_cuda(call: FlashAttentionCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/bench_cuda_attention_h200.json, forward in ms at B2 T8192:

    H32/8 D128 causal               1.66, Mosaic GPU 1.60, Triton 2.12
    H16 D128 causal                 0.869, Mosaic GPU 0.860, Triton 1.17
    H16 D128                        1.57, Mosaic GPU 1.56, Triton 2.15
    H32 D64                         2.03, Mosaic GPU 2.02, Triton 2.47
    H16/8 D256 window 4096 soft cap 1.31, Mosaic GPU 1.14 (where a cap bounds weights), Triton 2.19
    H64/8 D64 window 128            0.259, Mosaic GPU 0.203 (with packed heads), Triton 0.282

    and 1.48 at H16 D192/128 causal (flash_attention_cuda_h200.json), Mosaic GPU 1.05, Triton 1.88. In bench_cuda_chunks_h200.json,
    of one sequence, keys at the end of which the queries are:

    1 query, 131072 keys, H32/8 D128           0.139, Mosaic GPU 1.08, Triton 1.30, XLA 4.30
    16 queries, 32768 keys, H32/8 D128 causal  0.0463, Mosaic GPU 0.358, Triton 0.444, XLA 1.18
    256 queries, 32768 keys, H16/4 D128 causal 0.121, Mosaic GPU 0.411, Triton 0.360, XLA 1.84
    512 queries, 8192 keys, H16 D64            0.0531, Mosaic GPU 0.0976, Triton 0.0738, XLA 0.504
    4096 queries and keys, H9 D128             0.128, Mosaic GPU 0.156, Triton 0.213, XLA 1.90

    Of 4096 tokens in sequences of 256, 512 and 1024 (orders_h100.json, us): H16 D128 causal 37, 43, 55, Mosaic GPU 52, 55, 66,
    Triton 39, 47, 65; with a cap 40, 45, 65, Mosaic GPU 53, 57, 70; H8/4 D256 causal 30, 33, 43, Mosaic GPU 38, 42, 52, with a cap
    31, 35, 47, Mosaic GPU 38, 42, 51, full 31, 39, 58, Mosaic GPU 27, 36, 58.
    """
    width = call.window_width
    if few := _few_tokens(call, phase):
        return few
    if untimed := _untimed_attention(call):
        return Priority(BEHIND_TRITON, f"{untimed} were not timed")
    if few := _few_on_triton(call, phase):
        return few
    if call.value.shape[3] < call.query.shape[3]:
        return _narrow_values_on_cuda(call)
    shared, sees_all = call.query.shape[2] > call.key.shape[2], not call.causal and call.window is None
    narrow = width is not None and width < _NARROW_WINDOW and not _packs(call)
    wide, short = call.value.shape[3] > 128, _is_short(call)
    if short and wide and sees_all:
        return Priority(BEHIND_MOSAIC_GPU, "of few tokens that see all keys, Mosaic GPU's was faster for wide heads")
    if narrow or (
        (wide or sees_all or _is_chunk(call) or (call.causal and not shared)) and (call.logits_soft_cap is None or short)
    ):
        return Priority(FIRST)
    return Priority(
        BEHIND_MOSAIC_GPU,
        "under a cap, and for heads up to 128 that share keys under a mask, Mosaic GPU's was as fast or faster",
    )


def _narrow_values_on_cuda(call: FlashAttentionCall) -> Priority:
    """orders_h100.json, H16 D192/128, 4096 tokens in sequences of 256, 512 and 1024, forward in us: full 55, 71, 113, Mosaic GPU
    42, 54, 80; causal 56, 66, 83, Mosaic GPU 70, 73, 84, Triton 54, 66, 94; with a cap 58, 67, 95, Mosaic GPU 71, 76, 91."""
    if call.query.shape[1] < _SHORT and call.causal and call.logits_soft_cap is not None:
        return Priority(FIRST)
    return Priority(BEHIND_MOSAIC_GPU, "Mosaic GPU's was as fast or faster for values narrower than keys")


def _attention_on_cudnn(call: FlashAttentionCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/bench_cuda_attention_h200.json, of the first four cases above: forward 1.73, 0.954, 1.57, 2.24 ms; of one
    query over 131072 keys 0.127 (bench_cuda_chunks_h200.json). bench_mosaic_gpu_attention_h200.json: backward, which adds up in any
    order and is refused where that is not allowed, 5.04, 2.62, 4.56, 5.76 ms, Mosaic GPU's 5.48, 2.79, 5.23, 6.49; with a window of
    128, forward 0.279 ms. orders_h100.json, forward without a mask, 4096 tokens in sequences of 256, 512 and 1024, us: H32/8 D128
    39, 63, 113, CUDA 45, 70, 117; H16 D128 29, 36, 59, CUDA 33, 43, 69; H32 D64 29, 46, 81, CUDA 45, 56, 90."""
    if few := _few_tokens(call, phase):
        return few
    if phase == "forward":
        sees_all = not call.causal and call.window is None and call.logits_soft_cap is None
        if (_is_chunk(call) and call.query.shape[1] == 1) or (_is_short(call) and sees_all and call.query.shape[3] <= 128):
            return Priority(AHEAD_OF_CUDA)
        return Priority(BEHIND_TRITON, "on an H200 another kernel was faster for more than one query")
    if untimed := _untimed_attention(call):
        return Priority(BEHIND_TRITON, f"{untimed} were not timed")
    if call.window is not None or call.value.shape[3] > 128:
        return Priority(BEHIND_TRITON, "its gradients were timed without windows, with heads up to 128")
    return Priority(FIRST)


def _few_tokens(call: FlashAttentionCall, phase: Phase) -> Priority | None:
    tokens = min(call.query.shape[1], call.key.shape[1])
    fewest = _FEWEST_TOKENS if _is_short(call) else _SHORT
    if tokens >= fewest or (phase == "forward" and _is_chunk(call)):
        return None
    return Priority(UNMEASURED, f"{tokens} tokens, fewer than {fewest}, were not timed")


def _is_short(call: FlashAttentionCall) -> bool:
    plain = call.window is None and call.query_segments is None and call.bias is None
    return plain and max(call.query.shape[1], call.key.shape[1]) <= _SHORT


def _few_on_triton(call: FlashAttentionCall, phase: Phase) -> Priority | None:
    """Behind Triton, for a few tokens with heads of 64 under a causal mask or a cap (in sequences of 1024, gradients take as long
    on Mosaic GPU), and forward with values narrower than keys under a causal mask."""
    masked = call.causal or call.logits_soft_cap is not None
    few = call.query.shape[1] <= (_SHORT if phase == "forward" else _SHORT // 2)
    if _is_short(call) and few and masked and call.query.shape[3] <= 64:
        return Priority(BEHIND_TRITON, "Triton's was faster for few tokens with heads of 64 under a mask")
    narrow_values = call.value.shape[3] < call.query.shape[3] and call.query.shape[1] < _SHORT
    if phase == "forward" and narrow_values and call.causal and call.logits_soft_cap is None:
        return Priority(BEHIND_TRITON, "Triton's was as fast or faster for few tokens with values narrower than keys")
    return None


def _is_chunk(call: FlashAttentionCall) -> bool:
    """A few queries over as many keys as were timed with them."""
    return call.query.shape[1] < _SHORT and call.key.shape[1] >= _MANY_KEYS and call.window is None


def _packs(call: FlashAttentionCall) -> bool:
    """Whether Mosaic GPU's forward kernel has the query heads of a key head as rows, under a narrow window."""
    group, width = call.query.shape[2] // call.key.shape[2], call.window_width
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
