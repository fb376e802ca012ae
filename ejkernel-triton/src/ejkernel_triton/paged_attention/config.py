"""Performance knobs of `paged_attention`."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from ejkernel.operations.paged_attention.interface import PagedAttentionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._capability import shared_memory_limit

SMALLEST_ROWS = 16
"""Rows of the smallest product of a tensor core."""


@dataclasses.dataclass(frozen=True)
class PagedAttentionConfig:
    """How queries and keys are cut into programs.

    Attributes:
        rows: of a tile of queries, new tokens times the query heads of one key head; a power of two, at least 16.
        keys: that a program reads per step; a power of two, at least 16.
        num_warps: warps per program.
        num_stages: steps whose keys and values are in flight.
        programs: about how many programs the keys of all requests are shared among.
        decode_keys: if not 0, requests with few new tokens are served by a pass of their own, of tiles of 16 rows and steps of
            so many keys.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    programs: int
    decode_keys: int = 0


def padded(size: int) -> int:
    """The size of a head in a tile: a power of two that a product admits."""
    return max(16, 1 << max(size - 1, 0).bit_length())


def _wide(call: PagedAttentionCall) -> bool:
    """Whether products are of float32."""
    dtypes = {call.query.dtype, call.key_pages.dtype} - {"int8", "float8_e4m3fn", "float8_e5m2"}
    return dtypes not in ({"bfloat16"}, {"float16"})


def _bytes_of_step(call: PagedAttentionCall, keys: int) -> int:
    """Keys and values of one step in shared memory; narrow ones are widened for the product, next to themselves."""
    stored, product = np.dtype(call.key_pages.dtype).itemsize if "float8" not in call.key_pages.dtype else 1, 2
    width = padded(call.query.shape[3]) + padded(call.value_size)
    return keys * width * (4 if _wide(call) else max(stored, product if stored > 1 else 1))


def _fits(call: PagedAttentionCall, target: Target, rows: int, keys: int, stages: int) -> bool:
    itemsize = 4 if _wide(call) else 2
    queries = rows * padded(call.query.shape[3]) * itemsize
    weights = rows * keys * itemsize
    widened = keys * (padded(call.query.shape[3]) + padded(call.value_size)) * itemsize
    return stages * _bytes_of_step(call, keys) + queries + weights + widened <= shared_memory_limit(target)


def heuristic(call: PagedAttentionCall, target: Target) -> PagedAttentionConfig:
    """Where there are more new tokens than requests, tiles as high as an average request, and a pass for those that decode."""
    tokens, requests = call.query.shape[1], max(call.kv_lens.shape[1], 1)
    group = call.query.shape[2] // call.heads
    largest = padded(max(call.query.shape[3], call.value_size))
    keys = 64 if largest <= 128 and not _wide(call) else 32 if largest <= 256 else 16
    stages = next((n for n in (4, 3, 2) if _fits(call, target, SMALLEST_ROWS, keys, n)), 1)
    if tokens <= requests:
        return PagedAttentionConfig(_rows(group, 64), keys, 4, min(stages, 3), 1056)
    most = 16 if _wide(call) or largest > 256 else 64 if largest > 128 else 128
    rows = min(_rows(-(-tokens // requests) * group, most), most)
    stages = next((n for n in (3, 2) if _fits(call, target, rows, keys, n)), 1)
    decode_keys = keys if rows > SMALLEST_ROWS and requests > 1 else 0
    return PagedAttentionConfig(rows, keys, 8 if rows >= 128 else 4, stages, 528, decode_keys)


def _rows(wanted: int, most: int) -> int:
    return min(most, max(SMALLEST_ROWS, 1 << max(wanted - 1, 0).bit_length()))


def search_space(call: PagedAttentionCall, target: Target) -> list[PagedAttentionConfig]:
    chosen = heuristic(call, target)
    decoding = call.query.shape[1] <= call.kv_lens.shape[1]
    heights = (chosen.rows,) if decoding else tuple(sorted({16, 32, 64, 128, chosen.rows}))
    found = [
        PagedAttentionConfig(rows, keys, warps, stages, programs, chosen.decode_keys if rows > SMALLEST_ROWS else 0)
        for rows, keys, warps, stages, programs in itertools.product(
            heights, (16, 32, 64, 128), (2, 4, 8), (2, 3, 4), (264, 528, 1056, 2112)
        )
        if _admitted(call, target, rows, keys, warps, stages) and (decoding or programs in (528, 1056))
    ]
    return found if chosen in found else [chosen, *found]


def _admitted(call: PagedAttentionCall, target: Target, rows: int, keys: int, warps: int, stages: int) -> bool:
    """Fits shared memory, and a thread holds at most 128 sums and 128 scores or so of float32."""
    threads = 32 * warps
    sums = rows * padded(call.value_size) / threads
    scores = rows * keys / threads
    loaded = keys * padded(call.query.shape[3]) / threads
    most_loaded = 32 if _wide(call) else 128
    return sums <= 64 and scores <= 64 and loaded <= most_loaded and keys >= 32 // (2 if _wide(call) else 1) and (
        _fits(call, target, rows, keys, stages)
    )


CONFIGS = ConfigSpace(PagedAttentionConfig, heuristic, search_space)
