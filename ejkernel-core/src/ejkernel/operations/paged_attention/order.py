"""The default order of `paged_attention`."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.common.order import AHEAD_OF_CUDA, BEHIND_TRITON, FIRST, HALVES, Priority, forward_on_triton
from ejkernel.operations.paged_attention.interface import PagedAttentionCall
from ejkernel.plugin import Phase
from ejkernel.targets import Target
from ejkernel.targets.nvidia import HOPPER_MULTIPROCESSORS

_MANY_REQUESTS, _VERY_MANY_REQUESTS = 4, 64
_MANY_NEW_TOKENS, _SOME_NEW_TOKENS = 512, 128
_FEW_NEW_TOKENS = 16
"""Of a request on average."""
_ONE_WAVE = range(3 * HOPPER_MULTIPROCESSORS // 4, HOPPER_MULTIPROCESSORS + 1)
"""Pairs of a request and a key head, for each of which a multiprocessor is free at once, while few are idle."""
_MANY_STORED_BYTES, _VERY_MANY_STORED_BYTES = 2**25, 2**28
"""Of keys and values that block tables have room for: lengths are not known before a program runs."""


def _paged_attention_on_cuda(call: PagedAttentionCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: bench_cuda_pages_h200.json, bench_cuda_pages_again_h200.json, bench_cuda_float8_pages_again_h200.json,
    decoding_few_h200.json, orders_h100.json, orders_grid_pages_h200.json, orders_grid_pages_more_h200.json."""
    requests = call.query.shape[0] * call.kv_lens.shape[1]
    if call.query.shape[1] > call.kv_lens.shape[1]:
        return Priority(BEHIND_TRITON, "it was faster for one new token of each request alone")
    if call.key_pages.dtype == "float8_e4m3fn":
        return Priority(FIRST)
    if call.key_pages.dtype in HALVES:
        stored = 2 * requests * call.longest * call.heads * (call.query.shape[3] + call.value_size)  # bytes
        much = stored >= _VERY_MANY_STORED_BYTES or requests >= _VERY_MANY_REQUESTS
        if call.query.shape[3] <= 64 and call.pages.page_size >= 64 and much:
            return Priority(BEHIND_TRITON, "Triton's was faster for heads of 64 in long pages of many requests")
        many = requests >= _MANY_REQUESTS or stored >= _MANY_STORED_BYTES
        return Priority(FIRST) if many else Priority(BEHIND_TRITON, "Triton's was faster for a short request")
    return Priority(BEHIND_TRITON, f"pages of {call.key_pages.dtype} were not timed beside Triton's")


def _prompts_on_cuda(call: PagedAttentionCall, phase: Phase, target: Target) -> Priority:
    """benchmarks/results: orders_h100.json, orders_grid_pages_h200.json, orders_grid_pages_more_h200.json."""
    tokens, requests = call.query.shape[1], call.kv_lens.shape[1]
    if call.query.shape[3] >= 128 and call.query.shape[2] >= 4 * call.heads:
        if tokens == requests and tokens * call.heads in _ONE_WAVE:
            return Priority(AHEAD_OF_CUDA)
        if tokens > requests and tokens >= _SOME_NEW_TOKENS:
            return Priority(FIRST)
    if tokens < _MANY_NEW_TOKENS or tokens <= _FEW_NEW_TOKENS * requests:
        return Priority(BEHIND_TRITON, "Triton's was faster for few new tokens, or was not timed beside it")
    return Priority(FIRST)


ORDER: Mapping[str, Mapping[str, int | Rule]] = {
    "gpu": {"triton": forward_on_triton, "cuda": _paged_attention_on_cuda, "cuda.prefill": _prompts_on_cuda}
}
"""benchmarks/results/paged_h200.json: Triton decodes 5 to 140 times as fast as XLA, 1.8 to 1.9 times as JAX's Pallas kernel."""
