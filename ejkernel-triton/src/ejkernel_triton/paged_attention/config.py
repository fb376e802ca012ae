"""Configs of `paged_attention`."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from ejkernel.operations.paged_attention.interface import PagedAttentionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.utils.dtypes import common_dtype
from ejkernel.utils.renamed_knobs import renamed_knobs
from ejkernel_triton._blocks import MIN_DOT_SIZE, dot_block, next_power_of_2
from ejkernel_triton._capability import shared_memory_limit
from ejkernel_triton._pages import ONE_BYTE

DECODE_STAGES = 2
"""Largest number of pipeline stages of the decode pass, which has long steps."""
LONG = 512
"""Context length from which a separate decode pass pays off."""


@renamed_knobs(tokens="block_q", keys="block_k", decode_keys="decode_block_k")
@dataclasses.dataclass(frozen=True)
class PagedAttentionConfig:
    """How queries and keys are tiled.

    Attributes:
        block_q: new tokens of one request that a program serves, with the query heads of one key head.
        block_k: keys that a program reads per step; a power of two, at least 16.
        num_warps: warps per program.
        num_stages: pipeline stages, including the current one.
        programs: target number of programs for split-KV.
        decode_block_k: if not 0, a separate pass with this many keys per step serves requests with one new token.
    """

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int
    decode_block_k: int = 0

    def __post_init__(self) -> None:
        if min(self.block_q, self.programs, self.num_warps, self.num_stages) < 1:
            raise ValueError(f"{self}: block_q, num_warps, num_stages and programs are at least 1")
        if any(keys < MIN_DOT_SIZE or keys & (keys - 1) for keys in (self.block_k, self.decode_block_k or MIN_DOT_SIZE)):
            raise ValueError(f"{self}: keys and decode_keys are powers of two of at least {MIN_DOT_SIZE}")


def product_dtype(call: PagedAttentionCall) -> Any:
    """Dtype of the MMA operands; 8-bit pages are converted to the query's."""
    stored, query = np.dtype(call.key_pages.dtype), np.dtype(call.query.dtype)
    return query if stored.itemsize == 1 else common_dtype(query, stored)


def product_itemsize(call: PagedAttentionCall) -> int:
    """Bytes of an MMA operand: 4 if queries or floating-point pages are float32, or one is bfloat16 and the other float16."""
    dtypes = {call.query.dtype, call.key_pages.dtype} - set(ONE_BYTE)
    return 2 if dtypes in ({"bfloat16"}, {"float16"}) else 4


def heads_of_tile(call: PagedAttentionCall) -> int:
    """Query heads of a tile, all of one key head."""
    return min(call.query.shape[2] // call.heads, _max_rows(call))


def rows_of_tile(call: PagedAttentionCall, tokens: int) -> int:
    return dot_block(tokens * heads_of_tile(call))


def _widest(call: PagedAttentionCall) -> int:
    return dot_block(max(call.query.shape[3], call.value_size))


def _max_rows(call: PagedAttentionCall) -> int:
    """Rows whose accumulator a program holds in registers."""
    size = _widest(call)
    if product_itemsize(call) == 4:
        return MIN_DOT_SIZE
    return 128 if size <= 128 else 64 if size <= 256 else 32


def _fits(call: PagedAttentionCall, target: Target, rows: int, keys: int, stages: int) -> bool:
    """Whether queries, weights, and keys and values of all pipeline stages fit in shared memory, with converted copies of 8-bit
    ones."""
    itemsize, stored = (
        product_itemsize(call),
        1 if call.key_pages.dtype in ONE_BYTE else np.dtype(call.key_pages.dtype).itemsize,
    )
    width = dot_block(call.query.shape[3]) + dot_block(call.value_size)
    steps = max(stages - 1, 1) * keys * width * stored + (keys * width * itemsize if stored != itemsize else 0)
    return steps + rows * (dot_block(call.query.shape[3]) + keys) * itemsize <= shared_memory_limit(target)


def _keys(call: PagedAttentionCall) -> int:
    size = _widest(call)
    most = 64 if product_itemsize(call) == 2 else 32
    return min(most if size <= 128 else most // 2 if size <= 256 else MIN_DOT_SIZE, dot_block(call.longest))


def _stages(call: PagedAttentionCall, target: Target, rows: int, keys: int, most: int) -> int:
    return next((stages for stages in range(most, 1, -1) if _fits(call, target, rows, keys, stages)), 1)


def heuristic(call: PagedAttentionCall, target: Target) -> PagedAttentionConfig:
    """With more new tokens than requests, tiles as high as an average request, and a separate decode pass."""
    tokens, requests = call.query.shape[1], max(call.kv_lens.shape[1], 1)
    keys = _keys(call)
    if tokens <= requests:
        return _decoding(call, target, keys)
    # wgmma operands lie in shared memory, mma operands in registers. Two co-resident low tiles hide each other's latency,
    # unless they spill.
    large = (target.capability or (0, 0)) >= (9, 0) and product_itemsize(call) == 2
    whole = large and (_widest(call) > 128 or call.logits_soft_cap is not None)
    most = max(_max_rows(call) // (1 if whole else 2), MIN_DOT_SIZE) // heads_of_tile(call)
    together = min(next_power_of_2(-(-tokens // requests)), 1 << (max(most, 1).bit_length() - 1))
    rows = rows_of_tile(call, together)
    decode_block_k = keys if together > 1 and requests > 1 and call.longest >= LONG else 0
    keys = max(keys // (1 if large else 2), MIN_DOT_SIZE)
    return PagedAttentionConfig(together, keys, warps_of(call, rows), _stages(call, target, rows, keys, 3), 528, decode_block_k)


def _decoding(call: PagedAttentionCall, target: Target, keys: int) -> PagedAttentionConfig:
    """Short steps with many stages; two warps if a step lies in one page."""
    rows = rows_of_tile(call, 1)
    if product_itemsize(call) != 2 or call.key_pages.dtype in ONE_BYTE or _widest(call) > 128:
        return PagedAttentionConfig(1, keys, warps_of(call, rows), _stages(call, target, rows, keys, 4), 1056)
    keys = min(keys, 32)
    warps, stages = (2, 3) if call.pages.page_size % keys == 0 else (4, 4)
    return PagedAttentionConfig(1, keys, warps, _stages(call, target, rows, keys, stages), 528)


def warps_of(call: PagedAttentionCall, rows: int) -> int:
    return 8 if rows * _widest(call) >= 128 * 128 else 4


def search_space(call: PagedAttentionCall, target: Target) -> list[PagedAttentionConfig]:
    """Only configs that differ for requests as long as the block table."""
    chosen = heuristic(call, target)
    decoding = call.query.shape[1] <= call.kv_lens.shape[1]
    heights = {1} if decoding else {chosen.block_q // 2, chosen.block_q, 2 * chosen.block_q} - {0}
    widths = {keys for keys in (16, 32, 64, 128) if min(chosen.block_k, 32) <= keys <= dot_block(call.longest)}
    stages = (2, 3, 4) if decoding else (2, 3)
    found = [
        PagedAttentionConfig(tokens, keys, warps, depth, programs, chosen.decode_block_k if tokens > 1 else 0)
        for tokens, keys, warps, depth, programs in itertools.product(
            sorted(heights), sorted(widths), (2, 4, 8), stages, (528, 1056) if decoding else (528,)
        )
        if _admitted(call, target, tokens, keys, warps, depth)
        and (warps < 8 or rows_of_tile(call, tokens) * keys >= 2048)
        and depth <= max(-(-call.longest // keys) + 1, 2)
        and (call.longest > 2 * keys or programs == chosen.programs)
    ]
    return found if chosen in found else [chosen, *found]


def _admitted(call: PagedAttentionCall, target: Target, tokens: int, keys: int, warps: int, stages: int) -> bool:
    """Whether a config fits in shared memory and registers, without more warps than it can use."""
    rows, threads = rows_of_tile(call, tokens), 32 * warps
    if tokens > 1 and tokens * heads_of_tile(call) > _max_rows(call):
        return False
    held = rows * (dot_block(call.value_size) + keys) / threads
    loaded = keys * _widest(call) * product_itemsize(call) / threads
    enough = warps == 2 or (held >= 2 and loaded >= 32)
    alone = tokens == 1 or _fits(call, target, rows_of_tile(call, 1), _keys(call), min(stages, DECODE_STAGES))
    return enough and held <= 128 and loaded <= 256 and alone and _fits(call, target, rows, keys, stages)


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Attributes:
    query_*: of the dQ kernel, which owns `query_block_q` new tokens and loops over tiles of `query_block_k` keys.
    key_*: of the kernel of dK and dV, which owns at most `key_block_k` keys of a page and loops over tiles of `key_block_q` tokens.
    """

    query_block_q: int
    query_block_k: int
    query_num_warps: int
    query_num_stages: int
    key_block_q: int
    key_block_k: int
    key_num_warps: int
    key_num_stages: int

    def __post_init__(self) -> None:
        if min(dataclasses.astuple(self)) < 1:
            raise ValueError(f"{self}: expected values of at least 1")
        if any(keys < MIN_DOT_SIZE or keys & (keys - 1) for keys in (self.query_block_k, self.key_block_k)):
            raise ValueError(f"{self}: query_block_k and key_block_k are powers of two of at least {MIN_DOT_SIZE}")


def backward_heuristic(call: PagedAttentionCall, target: Target) -> BackwardConfig:
    return _backward(call, target, 32)


def backward_space(call: PagedAttentionCall, target: Target) -> list[BackwardConfig]:
    chosen = backward_heuristic(call, target)
    found = [_backward(call, target, rows) for rows in (16, 64)]
    varied = [dataclasses.replace(chosen, **{name: 2 if getattr(chosen, name) == 1 else 1}) for name in _STAGES]
    warps = [dataclasses.replace(chosen, query_num_warps=8), dataclasses.replace(chosen, key_num_warps=8)]
    return list(dict.fromkeys([chosen, *found, *varied, *warps]))


_STAGES = ("query_num_stages", "key_num_stages")


def _backward(call: PagedAttentionCall, target: Target, rows: int) -> BackwardConfig:
    """Tiles of about so many rows, fewer where heads are wide or float32: both kernels hold two of the size of a head."""
    size, exact = _widest(call), product_itemsize(call) == 4
    rows = min(rows, 16 if exact or size > 256 else 32 if size > 128 else 64)
    keys = min(16 if exact or size > 256 else 32, dot_block(call.longest))
    tokens = max(rows // heads_of_tile(call), 1)
    mean = -(-call.query.shape[1] // max(call.kv_lens.shape[1], 1))
    together = min(tokens, next_power_of_2(mean))
    warps = 8 if size > (64 if exact else 256) else 4
    stages = 1 if exact or size > 128 else 2
    of_page = min(keys, dot_block(call.pages.page_size))
    return BackwardConfig(together, keys, warps, stages, together, of_page, warps, stages)


FORWARD = ConfigSpace(PagedAttentionConfig, heuristic, search_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
