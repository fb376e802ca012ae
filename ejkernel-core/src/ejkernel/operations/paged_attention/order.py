"""The default order of `paged_attention`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import BEHIND_TRITON, FIRST, HALVES, TRITON, Priority
from ejkernel.operations.paged_attention.interface import PagedAttentionCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target

_MANY_REQUESTS = 8
_MANY_NEW_TOKENS = 512
_FEW_NEW_TOKENS = 16
"""Of a request on average."""
_MANY_STORED_BYTES, _VERY_MANY_STORED_BYTES = 2**25, 2**28
"""Of keys and values that block tables have room for: lengths are not known before a program runs."""


def _paged_attention_on_cuda(call: PagedAttentionCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/bench_cuda_pages_h200.json, decoding from bfloat16: 0.247 ms for 64 requests, Triton 0.264, and for one
    of 131072 tokens 0.125, Triton 0.128, and 0.253, 0.270, 0.128, 0.131 on another H200 (bench_cuda_pages_again_h200.json);
    bench_cuda_float8_pages_again_h200.json, from float8_e4m3fn: 0.133 ms and 0.0704 ms, Triton 0.294 and 0.145. In between
    (decoding_few_h200.json; other heads than H32/8 with an earlier form of CUDA's), microseconds:

    H32/8 D128 1 x 1024    9.7, Triton 7.8      H64/8 D64 1 x 1024    10.9, Triton 7.7
    H32/8 D128 1 x 8192    16.1, Triton 18.4    H64/8 D64 1 x 8192    14.8, Triton 14.0
    H32/8 D128 4 x 4096    24.6, Triton 30.2    H64/8 D64 1 x 32768   27.3, Triton 28.9
    H32/8 D128 8 x 1024    17.2, Triton 22.5    H64/8 D64 8 x 1024    15.4, Triton 17.6
    H32/8 D128 16 x 8192   131, Triton 140      H32/32 D128 1 x 1024  13.2, Triton 12.6

    On an H100 (orders_h100.json), 64 x 4096: H32/8 D128 363, Triton 368, H16 D128 713, Triton 719, H64/8 D64 208, Triton 216, but
    in pages of 64 tokens 206, Triton 195.
    """
    requests = call.query.shape[0] * call.kv_lens.shape[1]
    if call.query.shape[1] > call.kv_lens.shape[1]:
        return Priority(BEHIND_TRITON, "it was faster for one new token of each request alone")
    if call.key_pages.dtype == "float8_e4m3fn":
        return Priority(FIRST)
    if call.key_pages.dtype in HALVES:
        stored = 2 * requests * call.longest * call.heads * (call.query.shape[3] + call.value_size)  # bytes
        if call.query.shape[3] <= 64 and call.pages.page_size >= 64 and stored >= _VERY_MANY_STORED_BYTES:
            return Priority(BEHIND_TRITON, "Triton's was faster for heads of 64 in long pages that hold very much")
        many = requests >= _MANY_REQUESTS or stored >= _MANY_STORED_BYTES
        return Priority(FIRST) if many else Priority(BEHIND_TRITON, "Triton's was faster for a short request")
    return Priority(BEHIND_TRITON, f"pages of {call.key_pages.dtype} were not timed beside Triton's")


def _prompts_on_cuda(call: PagedAttentionCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results/orders_h100.json, milliseconds, in pages of 16 and 64:

    4 x 1024 of 8192 H32/8 D128       0.87, 0.82, Triton 1.67, 1.19      H64/8 D64   1.14, 1.09, Triton 2.23, 1.64
    1 x 2048 of 2048 H32/8 D128       0.095, 0.090, Triton 0.133, 0.109  H16 D128    0.062, 0.058, Triton 0.079, 0.063
    60 x 1, 2 x 1024 of 4096 H32/8    0.57, 0.54, Triton 0.69, 0.68      H16 D128    0.82, 0.78, Triton 0.88, 0.83
    """
    tokens, requests = call.query.shape[1], call.kv_lens.shape[1]
    if tokens < _MANY_NEW_TOKENS or tokens <= _FEW_NEW_TOKENS * requests:
        return Priority(BEHIND_TRITON, "Triton's was faster for few new tokens, or was not timed beside it")
    return Priority(FIRST)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {
    "gpu": {"triton": TRITON, "cuda": _paged_attention_on_cuda, "cuda.prefill": _prompts_on_cuda}
}
"""benchmarks/results/paged_h200.json: Triton decodes 5 to 140 times as fast as XLA, 1.8 to 1.9 times as JAX's Pallas kernel."""
