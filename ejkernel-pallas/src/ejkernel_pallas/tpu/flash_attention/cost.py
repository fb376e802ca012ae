"""Cost estimates of the attention kernels for XLA: FLOPs and exponentials of the visited tiles, and bytes of block copies.

Exact if indices alone determine the visited tiles, else an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel_pallas._call import block_traffic, cost_estimate
from ejkernel_pallas.tpu.flash_attention.arrays import Operands
from ejkernel_pallas.tpu.flash_attention.scores import TOKEN_INFO_ROWS, Scores, token_info_of

Blocks = Iterator[tuple[tuple[int, ...], Any, int]]


def _extras(operands: Operands, queries: int, keys: int, pairs: int) -> Blocks:
    """Copies of token info, bias and mask, from the number of changes of query block, key block and tile."""
    call, block_q, block_k = operands.call, operands.block_q, operands.block_k
    if token_info_of(call).count:
        yield (TOKEN_INFO_ROWS, block_q), "int32", queries
        yield (TOKEN_INFO_ROWS, block_k), "int32", keys
    for spec in (call.bias, call.mask):
        if spec is not None:
            scores = Scores.of(spec)
            times = pairs if scores.queried and scores.keyed else keys if scores.keyed else queries
            yield scores.block(block_q, block_k), "int8" if spec.dtype == "bool" else spec.dtype, times


def _estimate(operands: Operands, tiles: int, width: int, blocks: Blocks, lists: int) -> Any:
    """Cost of `tiles` tiles with `width` multiply-adds per score."""
    scores = tiles * operands.block_q * operands.block_k
    transcendentals = scores * (1 if operands.call.logits_soft_cap is None else 2)
    return cost_estimate(2 * scores * width, transcendentals, block_traffic(blocks) + 4 * lists)


def _list_entries(operands: Operands) -> int:
    tiles = operands.tiles
    return 0 if tiles is None else tiles.length * (operands.call.query.shape[0] if tiles.per_batch else 1)


def _heads(call: FlashAttentionCall) -> int:
    """Passes over a tile list: one per batch and query head."""
    return call.query.shape[0] * call.query.shape[2]


def _blocks_of_keys(operands: Operands) -> int:
    """Key blocks copied by a kernel that owns queries; a single block stays for all heads of a group."""
    call, tiles = operands.call, operands.tiles
    assert tiles is not None
    return _heads(call) * tiles.others // (call.query.shape[2] // call.key.shape[2] if tiles.others == 1 else 1)


def forward_cost(operands: Operands, *, wants_lse: bool) -> Any:
    call, tiles = operands.call, operands.tiles
    assert tiles is not None
    walks, dtype = _heads(call), call.query.dtype
    size, value_size = call.query.shape[3], call.value.shape[3]
    owners, others = walks * tiles.owners, _blocks_of_keys(operands)

    def blocks() -> Blocks:
        yield (size, operands.block_q), dtype, owners
        yield (size + value_size, operands.block_k), dtype, others
        yield (value_size, operands.block_q), dtype, owners
        if wants_lse:
            yield (1, operands.block_q), "float32", owners
        yield from _extras(operands, owners, others, walks * tiles.length)

    return _estimate(operands, walks * tiles.visited, size + value_size, blocks(), _list_entries(operands))


def _backward_blocks(operands: Operands, queries: int, keys: int, pairs: int) -> Blocks:
    """Block copies of all backward kernels."""
    call = operands.call
    size = call.query.shape[3] + call.value.shape[3]
    yield (size, operands.block_q), call.query.dtype, queries
    yield (2, operands.block_q), "float32", queries
    yield (size, operands.block_k), call.query.dtype, keys
    yield from _extras(operands, queries, keys, pairs)


def by_key_cost(operands: Operands) -> Any:
    """Cost of the dK/dV kernel: scores, gradients of weights, and both outputs."""
    call, tiles = operands.call, operands.tiles
    assert tiles is not None
    walks, group = _heads(call), call.query.shape[2] // call.key.shape[2]
    size, value_size = call.query.shape[3], call.value.shape[3]
    # All heads of a group visit a tile before the next.
    queries = walks * (tiles.others if group == 1 else tiles.length)
    keys = walks // group * tiles.owners

    def blocks() -> Blocks:
        yield from _backward_blocks(operands, queries, keys, walks * tiles.length)
        yield (size + value_size, operands.block_k), call.key.dtype, keys

    width = 2 * (size + value_size)
    return _estimate(operands, walks * tiles.visited, width, blocks(), _list_entries(operands))


def by_query_cost(operands: Operands) -> Any:
    """Cost of the dQ kernel."""
    call, tiles = operands.call, operands.tiles
    assert tiles is not None
    walks, size, value_size = _heads(call), call.query.shape[3], call.value.shape[3]
    queries, keys = walks * tiles.owners, _blocks_of_keys(operands)

    def blocks() -> Blocks:
        yield from _backward_blocks(operands, queries, keys, walks * tiles.length)
        yield (size, operands.block_q), call.query.dtype, queries

    width = 2 * size + value_size
    return _estimate(operands, walks * tiles.visited, width, blocks(), _list_entries(operands))


def bias_cost(operands: Operands, results: int) -> Any:
    """Cost of the dBias kernel, which visits every tile; `results` are blocks of the gradient."""
    call = operands.call
    steps = _heads(call) * (operands.rows // operands.block_q) * (operands.columns // operands.block_k)
    scores = Scores.of(call.bias)

    def blocks() -> Blocks:
        yield from _backward_blocks(operands, steps, steps, steps)
        yield scores.block(operands.block_q, operands.block_k), "float32", results

    return _estimate(operands, steps, call.query.shape[3] + call.value.shape[3], blocks(), 0)
