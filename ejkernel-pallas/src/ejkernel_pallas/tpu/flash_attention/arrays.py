"""Operands of the attention kernels: their layouts and block specs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs
from ejkernel_pallas.tpu.flash_attention import tiles as lists
from ejkernel_pallas.tpu.flash_attention.scores import TOKEN_INFO_ROWS, Scores, Tile, token_info_arrays, token_info_of


def padded_length(length: int, block: int) -> int:
    return lists.blocks(length, block) * block


def with_tokens_as_lanes(array: Any, length: int) -> Any:
    """`[b, t, h, d]` as `[b, h, d, length]`, zeros past the end."""
    return jnp.pad(jnp.transpose(array, (0, 2, 3, 1)), ((0, 0), (0, 0), (0, 0), (0, length - array.shape[1])))


def with_tokens_as_rows(array: Any, length: int) -> Any:
    """`[b, t, h, d]` as `[b, h, length, d]`, zeros past the end."""
    return jnp.pad(jnp.transpose(array, (0, 2, 1, 3)), ((0, 0), (0, 0), (0, length - array.shape[1]), (0, 0)))


def has_mask(call: FlashAttentionCall) -> bool:
    """Whether some pair may be masked."""
    elementwise = call.bias is not None or call.mask is not None or call.query_segments is not None
    return elementwise or call.causal or call.window is not None or call.chunk_size is not None


def finite(array: Any) -> Any:
    return jnp.where(jnp.isfinite(array), array, jnp.zeros((), array.dtype))


def nan_safe(call: FlashAttentionCall, key: Any, value: Any) -> tuple[Any, Any]:
    """NaN-safe keys and values: values are made finite, as masked ones have weight 0; NaN in the key's logits, which the mask
    can remove, replaces a non-finite value."""
    if not has_mask(call):
        return key, value
    bad = ~jnp.all(jnp.isfinite(value), axis=-1, keepdims=True)
    return jnp.where(bad, jnp.asarray(jnp.nan, key.dtype), key), finite(value)


TileIndex = Callable[[tuple[Any, ...]], tuple[Any, Any, Any, Any]]
"""Maps the arguments of an index map to batch, query head, query block and key block."""


@dataclasses.dataclass(frozen=True)
class Operands:
    """The operands of a tile beside query, key and value: token info, bias and mask.

    Attributes:
        call, inputs: of the operation.
        tiles: the tile list of the grid.
        rows, columns: lengths after padding.
        block_q, block_k: sizes of a tile.
    """

    call: FlashAttentionCall
    inputs: FlashAttentionInputs
    tiles: lists.Tiles | None
    rows: int
    columns: int
    block_q: int
    block_k: int

    def tile_index(self, head: Callable[..., Any], *, axes: int = 3, by_key: bool = False) -> TileIndex:
        """The tile index of a grid with `axes` axes (batches, heads, list entries, ...); `head` maps grid indices to the query
        head."""
        tiles = self.tiles
        assert tiles is not None

        def where(place: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
            grid, r_tiles = place[:axes], place[axes]
            packed = tiles.at(r_tiles, grid[0], grid[2])
            own, other = lists.owner_of(packed), lists.other_of(packed)
            return grid[0], head(*grid), other if by_key else own, own if by_key else other

        return where

    def tile(self, i_batch: Any, i_head: Any, i_query: Any, i_key: Any, extras: list[Any]) -> Tile:
        """The tile that a kernel processes; `extras` are from `split`."""
        head = i_batch * self.call.query.shape[2] + i_head
        return Tile(self.call, i_query, i_key, self.block_q, self.block_k, head, *extras)

    def described(self, where: TileIndex) -> tuple[list[Any], list[pl.BlockSpec]]:
        """Token info, bias, mask and dropout streams, as far as present, and their block specs."""
        arrays: list[Any] = list(token_info_arrays(self.call, self.inputs, self.rows, self.columns))
        specs = [
            pl.BlockSpec((None, TOKEN_INFO_ROWS, block), self._token_info_index(where, which, array.shape[0] > 1))
            for which, block, array in zip((2, 3), (self.block_q, self.block_k), arrays, strict=False)
        ]
        for name in ("bias", "mask"):
            spec = getattr(self.call, name)
            if spec is not None:
                scores = Scores.of(spec)
                arrays.append(scores.stored(getattr(self.inputs, name), self.rows, self.columns))
                specs.append(
                    pl.BlockSpec(
                        (None, None, *scores.block(self.block_q, self.block_k)),
                        lambda *place, scores=scores: scores.place(*where(place)),
                    )
                )
        if self.inputs.dropout_streams is not None:
            arrays.append(jax.lax.bitcast_convert_type(self.inputs.dropout_streams, jnp.int32).reshape(-1))
            specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
        return arrays, specs

    def _token_info_index(self, where: TileIndex, which: int, batched: bool) -> Any:
        def place(*grid: Any) -> tuple[Any, int, Any]:
            found = where(grid)
            return (found[0] if batched else 0), 0, found[which]

        return place

    def split(self, refs: tuple[Any, ...], scalars: int, mains: int, results: int) -> tuple[Any, Any, list[Any], Any, Any]:
        """Split kernel references: scalars, main operands, `[query info, key info, bias, mask, streams]` (None if absent),
        results, scratch."""
        rest = list(refs[scalars + mains :])
        has_info = token_info_of(self.call).count > 0
        wanted = (has_info, has_info, self.call.bias is not None, self.call.mask is not None, self.call.dropout_rate > 0)
        extras = [rest.pop(0) if is_wanted else None for is_wanted in wanted]
        return refs[:scalars], refs[scalars : scalars + mains], extras, rest[:results], rest[results:]
