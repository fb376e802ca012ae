"""Contract of `block_sparse_attention`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int32

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, named
from ejkernel.call.random import positions
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.block_sparse_attention.tiles import check_predicate
from ejkernel.operations.common.options import as_count
from ejkernel.operations.flash_attention.interface import (
    OPERATION as FLASH_ATTENTION,
    FlashAttentionCall,
    FlashAttentionInputs,
    FlashAttentionOutputs,
)
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_array, check_shape
from ejkernel.utils.integers import as_int32


class BlockSparseAttentionInputs(NamedTuple):
    """Canonical arrays: those of `flash_attention` without dropout, and lists of tiles.

    key_tiles int32 `[B|1, n, m]`: besides what the masks say, queries of block i see only keys of the blocks `key_tiles[b, i]`,
    no block twice; the list ends at the first negative entry. Blocks have `q_blocksize` queries and `kv_blocksize` keys, the last
    ones fewer. full_tiles bool, as key_tiles: a promise that no mask hides a pair of the tile. Without key_tiles an
    implementation chooses its own tiles. With per_head_tiles both are `[B|1, h, n, m]`, lists of every head.
    """

    query: Float[Array, "b t h d"]
    key: Float[Array, "b s k d"]
    value: Float[Array, "b s k v"]
    bias: Float[Array, "#b #h #t #s"] = None
    mask: Bool[Array, "#b #h #t #s"] = None
    query_segments: Int32[Array, "#b t"] = None
    key_segments: Int32[Array, "#b s"] = None
    query_positions: Int32[Array, "#b t"] = None
    key_positions: Int32[Array, "#b s"] = None
    softmax_aux: Float[Array, "#b h n"] = None
    key_tiles: Int32[Array, "#b *h tiles m"] = None
    full_tiles: Bool[Array, "#b *h tiles m"] = None


BlockSparseAttentionOutputs = FlashAttentionOutputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSparseAttentionCall(Call):
    """Static facts, as in `flash_attention`.

    Attributes:
        q_blocksize, kv_blocksize: tokens of the listed blocks; None without lists.
        mask_builder: a rule from positions of queries and keys, int32 arrays that broadcast together, to visibility; None = all.
        per_head_tiles: every head has lists of its own.
    """

    query: ArraySpec
    key: ArraySpec
    value: ArraySpec
    bias: ArraySpec | None = None
    mask: ArraySpec | None = None
    query_segments: ArraySpec | None = None
    key_segments: ArraySpec | None = None
    query_positions: ArraySpec | None = None
    key_positions: ArraySpec | None = None
    softmax_aux: ArraySpec | None = None
    key_tiles: ArraySpec | None = None
    full_tiles: ArraySpec | None = None
    softmax_scale: float
    causal: bool = False
    query_offset: int = 0
    window: tuple[int | None, int | None] | None = None
    chunk_size: int | None = None
    prefix: int | None = None
    logits_soft_cap: float | None = None
    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    mask_builder: Callable[[Any, Any], Any] | None = None
    per_head_tiles: bool = False

    @property
    def blocks(self) -> tuple[int, int]:
        """Tokens of the listed blocks, of queries and of keys; of a call without lists, 1."""
        return self.q_blocksize or 1, self.kv_blocksize or 1


_LISTS = ("key_tiles", "full_tiles")
_SHARED = tuple(name for name in BlockSparseAttentionInputs._fields if name not in _LISTS)
_FLAGS = ("softmax_scale", "causal", "query_offset", "window", "chunk_size", "prefix", "logits_soft_cap", "save_residuals")


def as_flash_call(call: BlockSparseAttentionCall) -> FlashAttentionCall:
    """The same problem as dense attention, without the lists and without `mask_builder`."""
    return FlashAttentionCall(**{name: getattr(call, name) for name in (*_SHARED, *_FLAGS)})


def as_flash_attention(
    call: BlockSparseAttentionCall, inputs: BlockSparseAttentionInputs
) -> tuple[FlashAttentionCall, FlashAttentionInputs]:
    """As `as_flash_call`, with its arrays."""
    return as_flash_call(call), FlashAttentionInputs(**{name: getattr(inputs, name) for name in _SHARED})


class BlockSparseAttention(Operation):
    """`out = softmax(mask(cap(scale * query . key + bias)), sinks) . value` over the tiles that hold visible pairs."""

    name = "block_sparse_attention"
    Call = BlockSparseAttentionCall
    Inputs = BlockSparseAttentionInputs
    Outputs = BlockSparseAttentionOutputs
    revisions = (18, ("per_head_tiles",))
    renamed = FLASH_ATTENTION.renamed
    differentiable = ("query", "key", "value", "bias", "softmax_aux")
    shardable = ("b", "h")
    traceable = FLASH_ATTENTION.traceable

    def canonicalise(
        self,
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        softmax_aux: Any = None,
        mask_info: Any = None,
        mask: Any = None,
        query_segments: Any = None,
        key_segments: Any = None,
        query_positions: Any = None,
        key_positions: Any = None,
        query_lengths: Any = None,
        key_lengths: Any = None,
        key_tiles: Any = None,
        full_tiles: Any = None,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        causal_alignment: str | None = None,
        sliding_window: Any = None,
        chunk_size: int | None = None,
        logits_soft_cap: float | None = None,
        q_blocksize: int | None = None,
        kv_blocksize: int | None = None,
        mask_builder: Callable[[Any, Any], Any] | None = None,
        prefix: int | None = None,
    ) -> Bound:
        """Check the arguments and combine everything said about visibility by AND.

        Args:
            query: `[B, T, H, D]`; key, value, bias, softmax_aux, masks, segments, positions, lengths and the other options as in
                `flash_attention`.
            key_tiles: int `[B|1, n, m]` with n = ceil(T / q_blocksize), or `[B|1, H, n, m]`, lists of every head.
            full_tiles: bool, shaped like key_tiles.
            q_blocksize, kv_blocksize: tokens of the listed blocks.
            mask_builder: `(query_positions, key_positions) -> bool`, elementwise.
        """
        dense = FLASH_ATTENTION.canonicalise(
            query,
            key,
            value,
            bias,
            softmax_aux,
            mask_info,
            mask,
            query_segments,
            key_segments,
            query_positions,
            key_positions,
            query_lengths,
            key_lengths,
            softmax_scale=softmax_scale,
            causal=causal,
            causal_alignment=causal_alignment,
            sliding_window=sliding_window,
            chunk_size=chunk_size,
            prefix=prefix,
            logits_soft_cap=logits_soft_cap,
        )
        if mask_builder is not None:
            check_predicate(mask_builder)
        shared = {name: getattr(dense.inputs, name) for name in _SHARED}
        if mask_builder is not None:
            shared |= _positions(dense.call, mask_info, query_positions, key_positions)
        if key_tiles is not None:
            q_blocksize = as_count("q_blocksize", q_blocksize, 1)
            kv_blocksize = as_count("kv_blocksize", kv_blocksize, 1)
            sizes = query.shape[0], query.shape[2], -(-query.shape[1] // q_blocksize)
            shared |= _lists(key_tiles, full_tiles, sizes)
        else:
            for name, given in (("full_tiles", full_tiles), ("q_blocksize", q_blocksize), ("kv_blocksize", kv_blocksize)):
                if given is not None:
                    raise invalid(name, given if isinstance(given, int) else "an array", "None without key_tiles")
        inputs = BlockSparseAttentionInputs(**shared)
        call = BlockSparseAttentionCall(
            **{name: ArraySpec.of(array) for name, array in named(inputs)},  # pyright: ignore[reportArgumentType]
            **{name: getattr(dense.call, name) for name in _FLAGS},
            q_blocksize=q_blocksize,
            kv_blocksize=kv_blocksize,
            mask_builder=mask_builder,
            per_head_tiles=inputs.key_tiles is not None and inputs.key_tiles.ndim == 4,
        )
        return Bound(call, inputs, dense.finish)

    def check_values(self, arrays: Mapping[str, Any]) -> None:
        """Lengths that are known must lie within the arrays that they describe."""
        FLASH_ATTENTION.check_values(arrays)

    def random_inputs(
        self, call: BlockSparseAttentionCall, rng: np.random.Generator, **given: Any
    ) -> BlockSparseAttentionInputs:
        """As `flash_attention`; lists name the first tiles of each row, all of them with pairs to mask."""
        dense = FLASH_ATTENTION.random_inputs(as_flash_call(call), rng)
        known = {name: getattr(dense, name) for name in _SHARED if getattr(call, name) is not None}
        if call.key_tiles is not None:
            tiles = -(-call.key.shape[1] // (call.kv_blocksize or 1))
            listed = positions(call.key_tiles)
            known["key_tiles"] = np.where(listed < tiles, listed, -1).astype(np.int32)
        if call.full_tiles is not None:
            known["full_tiles"] = np.zeros(call.full_tiles.shape, bool)
        return super().random_inputs(call, rng, **{**known, **given})

    def dimensions(self, call: BlockSparseAttentionCall) -> Mapping[str, str]:
        dense = FLASH_ATTENTION.dimensions(as_flash_call(call))
        lists = "b? h n m" if call.per_head_tiles else "b? n m"
        return {**dense, "key_tiles": lists, "full_tiles": lists}

    def time(self, call: BlockSparseAttentionCall) -> Mapping[str, int] | None:
        return FLASH_ATTENTION.time(as_flash_call(call))

    def output_specs(self, call: BlockSparseAttentionCall) -> FlashAttentionOutputs:
        return FLASH_ATTENTION.output_specs(as_flash_call(call))

    def public(self, call: BlockSparseAttentionCall) -> tuple[str, ...]:
        return ("out",)

    def cost(self, call: BlockSparseAttentionCall, phase: Phase) -> Cost:
        """An upper bound: what segments, masks, predicates and lists hide is not known statically."""
        return FLASH_ATTENTION.cost(as_flash_call(call), phase)


def _positions(call: FlashAttentionCall, mask_info: Any, query_positions: Any, key_positions: Any) -> dict[str, Any]:
    """Positions for a predicate, which needs them even where causal, window and chunk masks do not ask for them."""
    if call.causal or call.window is not None or call.chunk_size is not None:
        return {}
    query = query_positions if query_positions is not None else getattr(mask_info, "query_positions", None)
    key = key_positions if key_positions is not None else getattr(mask_info, "key_positions", None)
    if offset := getattr(mask_info, "causal_offset", 0):
        query = (jnp.arange(call.query.shape[1])[None] if query is None else query) + offset
    found = {"query_positions": query, "key_positions": key}
    return {name: as_int32(array) for name, array in found.items() if array is not None}


def _lists(key_tiles: Any, full_tiles: Any, sizes: tuple[int, int, int]) -> dict[str, Any]:
    batch, heads, blocks = sizes
    check_array("key_tiles", key_tiles, floating=False)
    if not jnp.issubdtype(key_tiles.dtype, jnp.integer):
        raise wrong_type("key_tiles", f"dtype {key_tiles.dtype}", "an integer type")
    shape = tuple(key_tiles.shape)
    if shape[:1] not in ((batch,), (1,)) or shape[1:-1] not in ((blocks,), (heads, blocks)):
        expected = f"[{batch} or 1, {blocks}, m], or [{batch} or 1, {heads}, {blocks}, m]"
        raise invalid("key_tiles", f"shape {shape}", f"{expected}: {heads} heads, {blocks} blocks of queries")
    if full_tiles is not None:
        check_shape("full_tiles", full_tiles, shape, "the shape of key_tiles")
        if full_tiles.dtype != bool:
            raise wrong_type("full_tiles", f"dtype {full_tiles.dtype}", "bool")
    return {"key_tiles": as_int32(key_tiles), "full_tiles": full_tiles}


OPERATION = BlockSparseAttention()
