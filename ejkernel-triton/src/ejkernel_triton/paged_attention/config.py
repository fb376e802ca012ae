"""Performance knobs of `paged_attention`."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from ejkernel.operations.paged_attention.interface import PagedAttentionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._capability import shared_memory_limit
from ejkernel_triton._pages import ONE_BYTE

SMALLEST = 16
"""Rows, columns and depth of the smallest product of a tensor core."""


@dataclasses.dataclass(frozen=True)
class PagedAttentionConfig:
    """How queries and keys are cut into programs.

    Attributes:
        tokens: new tokens of one request that a program serves, with the query heads of one key head.
        keys: that a program reads per step; a power of two, at least 16.
        num_warps: warps per program.
        num_stages: steps in flight, the one at work included.
        programs: about how many programs the keys of all requests are shared among.
        decode_keys: if not 0, requests with one new token are served by a pass of their own, so many keys per step.
    """

    tokens: int
    keys: int
    num_warps: int
    num_stages: int
    programs: int
    decode_keys: int = 0


def padded(size: int) -> int:
    """The size of a head in a tile: a power of two that a product admits."""
    return max(SMALLEST, _power(size))


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def product_itemsize(call: PagedAttentionCall) -> int:
    """Bytes of an operand of the products: 4 where queries or floating pages are float32, or one bfloat16 and the other float16."""
    dtypes = {call.query.dtype, call.key_pages.dtype} - set(ONE_BYTE)
    return 2 if dtypes in ({"bfloat16"}, {"float16"}) else 4


def heads_of_tile(call: PagedAttentionCall) -> int:
    """Query heads of a tile, all under one key head."""
    return min(call.query.shape[2] // call.heads, _most_rows(call))


def rows_of_tile(call: PagedAttentionCall, tokens: int) -> int:
    return max(SMALLEST, _power(tokens * heads_of_tile(call)))


def _most_rows(call: PagedAttentionCall) -> int:
    """Rows whose weighted values a program holds in registers."""
    size = padded(max(call.query.shape[3], call.value_size))
    if product_itemsize(call) == 4:
        return 32 if size <= 128 else SMALLEST
    return 128 if size <= 128 else 64 if size <= 256 else 32


def _fits(call: PagedAttentionCall, target: Target, rows: int, keys: int, stages: int) -> bool:
    """Whether queries, weights, and keys and values of all steps in flight lie in shared memory; bytes are there widened too."""
    itemsize, stored = (
        product_itemsize(call),
        1 if call.key_pages.dtype in ONE_BYTE else np.dtype(call.key_pages.dtype).itemsize,
    )
    width = padded(call.query.shape[3]) + padded(call.value_size)
    steps = max(stages - 1, 1) * keys * width * stored + (keys * width * itemsize if stored != itemsize else 0)
    return steps + rows * (padded(call.query.shape[3]) + keys) * itemsize <= shared_memory_limit(target)


def _keys(call: PagedAttentionCall) -> int:
    size = padded(max(call.query.shape[3], call.value_size))
    most = 64 if product_itemsize(call) == 2 else 32
    return most if size <= 128 else most // 2 if size <= 256 else SMALLEST


def _stages(call: PagedAttentionCall, target: Target, rows: int, keys: int, most: int) -> int:
    return next((stages for stages in range(most, 1, -1) if _fits(call, target, rows, keys, stages)), 1)


def heuristic(call: PagedAttentionCall, target: Target) -> PagedAttentionConfig:
    """Where there are more new tokens than requests, tiles as high as an average request, and a pass for those that decode."""
    tokens, requests = call.query.shape[1], max(call.kv_lens.shape[1], 1)
    keys = _keys(call)
    if tokens <= requests:
        return PagedAttentionConfig(1, keys, 4, _stages(call, target, rows_of_tile(call, 1), keys, 4), 1056)
    tallest = _most_rows(call) // (1 if target.capability and target.capability >= (9, 0) else 2)
    most = max(tallest // heads_of_tile(call), 1)
    together = min(_power(-(-tokens // requests)), 1 << (most.bit_length() - 1))
    rows = rows_of_tile(call, together)
    decode_keys = keys if together > 1 and requests > 1 else 0
    warps = 8 if rows * padded(max(call.query.shape[3], call.value_size)) >= 128 * 128 else 4
    return PagedAttentionConfig(together, keys, warps, _stages(call, target, rows, keys, 3), 528, decode_keys)


def search_space(call: PagedAttentionCall, target: Target) -> list[PagedAttentionConfig]:
    chosen = heuristic(call, target)
    decoding = call.query.shape[1] <= call.kv_lens.shape[1]
    tokens = sorted({1, 2, 4, 8, 16, 32, chosen.tokens} if not decoding else {1})
    found = [
        PagedAttentionConfig(tokens, keys, warps, stages, programs, chosen.decode_keys if tokens > 1 else 0)
        for tokens, keys, warps, stages, programs in itertools.product(
            tokens, (16, 32, 64, 128), (2, 4, 8), (2, 3, 4, 5), (264, 528, 1056, 2112) if decoding else (264, 528, 1056)
        )
        if _admitted(call, target, tokens, keys, warps, stages)
    ]
    return found if chosen in found else [chosen, *found]


def _admitted(call: PagedAttentionCall, target: Target, tokens: int, keys: int, warps: int, stages: int) -> bool:
    """Fits shared memory and registers: sums, scores and addresses of keys."""
    rows, threads = rows_of_tile(call, tokens), 32 * warps
    if tokens > 1 and tokens * heads_of_tile(call) > _most_rows(call):
        return False
    held = rows * (padded(call.value_size) + keys) / threads
    loaded = keys * padded(max(call.query.shape[3], call.value_size)) * product_itemsize(call) / threads
    return 2 <= held <= 128 and 32 <= loaded <= 128 and _fits(call, target, rows, keys, stages)


FORWARD = ConfigSpace(PagedAttentionConfig, heuristic, search_space)
