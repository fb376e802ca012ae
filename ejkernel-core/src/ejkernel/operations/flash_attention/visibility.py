"""Which key each query sees: one description combined, by AND, from everything that a caller said."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.errors import EjkernelWarning, invalid, wrong_type
from ejkernel.operations.common.options import as_count, as_flag
from ejkernel.operations.flash_attention.bind import as_score_shaped
from ejkernel.utils.checks import check_array
from ejkernel.utils.integers import as_int32
from ejkernel.utils.tracing import is_traced, traced_count
from ejkernel.utils.warn_once import warn_once

Window = tuple[int | None, int | None]
ALIGNMENTS = ("top_left", "bottom_right")
LARGEST = 2**31 - 1
"""Positions are int32; a window beyond that is no limit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Visibility:
    """What was said about visibility, from one source; None or False where nothing was.

    Attributes are those of `FlashAttentionCall` and `FlashAttentionInputs`, and `query_lengths`, `key_lengths`: int `[B|1]`,
    how many tokens of each sequence are real.
    """

    mask: Any = None
    query_segments: Any = None
    key_segments: Any = None
    query_positions: Any = None
    key_positions: Any = None
    query_lengths: Any = None
    key_lengths: Any = None
    causal: bool = False
    query_offset: int = 0
    window: Window | None = None
    chunk_size: int | None = None
    prefix: int | None = None

    @classmethod
    def of_mask_info(cls, info: Any) -> Visibility:
        """What a `MaskInfo` says."""
        if info is None:
            return cls()
        try:
            return cls(
                mask=info.dense,
                query_segments=info.query_segments,
                key_segments=info.key_segments,
                query_positions=info.query_positions,
                key_positions=info.key_positions,
                query_lengths=info.query_lengths,
                key_lengths=info.key_lengths,
                causal=info.causal,
                query_offset=info.causal_offset,
                window=info.window,
                chunk_size=info.chunk_size,
                prefix=info.prefix,
            )
        except AttributeError:
            remedy = "wrap a boolean mask in MaskInfo.from_attention_mask(...)"
            got = "an array" if hasattr(info, "dtype") else type(info).__name__
            raise wrong_type("mask_info", got, "a MaskInfo", remedy=remedy) from None

    @property
    def positional(self) -> bool:
        """Whether positions matter."""
        return self.causal or self.window is not None or self.chunk_size is not None

    def __and__(self, other: Visibility) -> Visibility:
        """The pairs that both admit. Positions, and an offset of them, are facts about the tokens and hold for either side's
        causal, window and chunk masks; a prefix exempts only from the causal mask that it came with."""
        masks = [mask for mask in (self.mask, other.mask) if mask is not None]
        return Visibility(
            mask=masks[0] & masks[1] if len(masks) == 2 else next(iter(masks), None),
            query_segments=_only_one("query segments", self.query_segments, other.query_segments),
            key_segments=_only_one("key segments", self.key_segments, other.key_segments),
            query_positions=_only_one("query positions", self.query_positions, other.query_positions),
            key_positions=_only_one("key positions", self.key_positions, other.key_positions),
            query_lengths=_shorter(self.query_lengths, other.query_lengths),
            key_lengths=_shorter(self.key_lengths, other.key_lengths),
            causal=self.causal or other.causal,
            query_offset=self.query_offset or other.query_offset,
            window=intersection(self.window, other.window),
            chunk_size=_agreed("chunk_size", self.chunk_size, other.chunk_size),
            prefix=min((said.prefix or 0 for said in (self, other) if said.causal), default=0) or None,
        )

    def checked(self, sizes: tuple[int, int, int, int]) -> Visibility:
        """The same, with every array checked against (B, H, T, S) and every number brought to its normal form."""
        mask = self.mask
        if mask is not None:
            mask = as_score_shaped("mask", mask, sizes)
            if mask.dtype != np.bool_:
                raise wrong_type("mask", f"dtype {mask.dtype}", "bool", remedy="pass mask != 0, or a floating mask as bias")
        batch, _, queries, keys = sizes
        lengths = {"query_segments": queries, "key_segments": keys, "query_positions": queries, "key_positions": keys}
        tokens = {name: _integers(name, getattr(self, name), batch, (size,)) for name, size in lengths.items()}
        counts = {name: _integers(name, getattr(self, name), batch, ()) for name in ("query_lengths", "key_lengths")}
        return Visibility(
            mask=mask,
            causal=as_flag("causal", self.causal),
            query_offset=as_count("causal_offset", self.query_offset, -(2**31)),
            window=as_window(self.window),
            chunk_size=None if self.chunk_size is None else min(as_count("chunk_size", self.chunk_size, 1), LARGEST),
            prefix=None if self.prefix is None else min(as_count("prefix", self.prefix, 0), LARGEST),
            **tokens,
            **counts,
        )

    def aligned(self, alignment: str | None, queries: int, keys: int) -> Visibility:
        """With the queries placed as `causal_alignment` says."""
        check_alignment(alignment, self.causal)
        if alignment is None:
            self._warn_of_one_query(queries, keys)
            if self.query_offset and self.query_positions is not None:
                return dataclasses.replace(self, query_positions=self.query_positions + self.query_offset, query_offset=0)
            return self
        offset = keys - queries if alignment == "bottom_right" else 0
        if self.query_positions is not None or self.key_positions is not None:
            raise invalid(
                "causal_alignment", repr(alignment), "None when mask_info holds positions", remedy="give one of the two"
            )
        if self.query_offset not in (0, offset):
            raise invalid("causal_alignment", repr(alignment), f"None when mask_info has causal_offset {self.query_offset}")
        return dataclasses.replace(self, query_offset=offset)

    def _warn_of_one_query(self, queries: Any, keys: Any) -> None:
        """A query that decodes is the newest token, but stands at position 0 unless something says otherwise."""
        placed = self.query_offset or self.query_positions is not None or self.key_positions is not None
        if self.causal and self.prefix is None and not placed and queries == 1 and keys not in (0, 1):
            sees = f"with causal=True the one query sees the first of {keys} keys alone"
            remedy = (
                "causal_alignment='bottom_right' (of flash_attention) puts it at the last key; 'top_left' says this is meant"
            )
            warn_once("causal", f"{sees}: {remedy}", EjkernelWarning)

    def limited(self, limits: TracedLimits, queries: int, keys: int) -> Visibility:
        """With traced limits as part of the mask; the queries are placed already."""
        if not limits.given:
            return self
        query = jnp.arange(queries, dtype=jnp.int32)[None] if self.query_positions is None else self.query_positions
        key = jnp.arange(keys, dtype=jnp.int32)[None] if self.key_positions is None else self.key_positions
        mask = limits.mask(query + self.query_offset, key)
        return dataclasses.replace(self, mask=mask if self.mask is None else self.mask & mask)

    def with_padding_as_segments(self, queries: Any, keys: Any) -> Visibility:
        """Tokens past a length put into the padding segment -1. Segments of one side alone only mark its padding.

        `queries` and `keys` are how many there are or, in a shard, the indices `[T]` and `[S]` that lengths are compared with.
        """
        query, key = self.query_segments, self.key_segments
        given = (query, key, self.query_lengths, self.key_lengths)
        if all(array is None for array in given):
            return self
        if query is None or key is None:
            query, key = _only_padding(query), _only_padding(key)
        return dataclasses.replace(
            self,
            query_segments=_padded(query, self.query_lengths, queries),
            key_segments=_padded(key, self.key_lengths, keys),
            query_lengths=None,
            key_lengths=None,
        )

    def simplified(self) -> Visibility:
        """Without what has no effect, so that equal problems have equal calls."""
        window = self.window
        if window is not None and self.causal and self.prefix is None:
            window = (window[0], None)
        kept = dataclasses.replace(
            self, window=None if window == (None, None) else window, prefix=self.prefix if self.causal and self.prefix else None
        )
        if not kept.positional:
            return dataclasses.replace(kept, query_positions=None, key_positions=None, query_offset=0)
        return dataclasses.replace(kept, query_offset=0) if kept.query_positions is not None else kept


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedLimits:
    """The window and the chunk that only the running program knows, int32 scalars: they become part of the dense mask."""

    left: Any = None
    right: Any = None
    chunk_size: Any = None

    @classmethod
    def taken_from(cls, window: Any, chunk_size: Any) -> tuple[TracedLimits, Any, Any]:
        """What is traced, and the window and the chunk without it."""
        sides = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
        sides = sides if len(sides) == 2 else (None, None)
        left, right = (traced_count("sliding_window", side, 0) if is_traced(side) else None for side in sides)
        if left is not None or right is not None:
            window = tuple(None if is_traced(side) else side for side in sides)
        if is_traced(chunk_size):
            return cls(left=left, right=right, chunk_size=traced_count("chunk_size", chunk_size, 1)), window, None
        return cls(left=left, right=right), window, chunk_size

    @property
    def given(self) -> bool:
        return self.left is not None or self.right is not None or self.chunk_size is not None

    def mask(self, query: Any, key: Any) -> Any:
        """bool `[B|1, 1, T, S]` of positions int32 `[B|1, T]` and `[B|1, S]`."""
        query, key = query[:, None, :, None], key[:, None, None, :]
        parts = [] if self.left is None else [query - key <= self.left]
        parts += [] if self.right is None else [key - query <= self.right]
        parts += [] if self.chunk_size is None else [query // self.chunk_size == key // self.chunk_size]
        return functools.reduce(operator.and_, parts)


def check_alignment(alignment: str | None, causal: bool) -> None:
    """Refuse an unknown alignment, and one that nothing would use."""
    if alignment is not None and alignment not in ALIGNMENTS:
        raise invalid("causal_alignment", repr(alignment), f"None or one of {', '.join(ALIGNMENTS)}")
    if alignment is not None and not causal:
        raise invalid("causal_alignment", repr(alignment), "None without causal=True")


def as_window(value: Any) -> Window | None:
    """A window `(left, right)`; an int w means (w, w); None on a side is unlimited."""
    if value is None:
        return None
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != 2:
            raise invalid("sliding_window", tuple(value), "an int or a pair (left, right)")
        left, right = value
    else:
        left = right = as_count("sliding_window", value, 0)
    counts = (None if side is None else as_count("sliding_window", side, 0) for side in (left, right))
    return tuple(None if count is None or count >= LARGEST else count for count in counts)  # pyright: ignore[reportReturnType]


def intersection(first: Any, second: Any) -> Window | None:
    """The keys in both windows."""
    first, second = as_window(first), as_window(second)
    if first is None or second is None:
        return first or second
    sides = zip(first, second, strict=True)
    left, right = (min((s for s in pair if s is not None), default=None) for pair in sides)
    return left, right


def _only_one(what: str, first: Any, second: Any) -> Any:
    if first is not None and second is not None:
        raise invalid("mask_info", f"{what} that are given a second time", "them from one source only")
    return second if first is None else first


def _agreed(name: str, first: int | None, second: int | None) -> int | None:
    if first is not None and second is not None and first != second:
        raise invalid(name, f"{first} as an argument and {second} in mask_info", "one value")
    return second if first is None else first


def _shorter(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    return jnp.minimum(first, second)


def _integers(name: str, array: Any, batch: int, rest: tuple[int, ...]) -> Any:
    if array is None:
        return None
    check_array(name, array, floating=False)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise wrong_type(name, f"dtype {array.dtype}", "an integer type")
    if tuple(array.shape) not in ((batch, *rest), (1, *rest)):
        raise invalid(name, f"shape {tuple(array.shape)}", f"{(batch, *rest)} or {(1, *rest)}")
    return as_int32(array)


def _only_padding(segments: Any) -> Any:
    return None if segments is None else jnp.minimum(jnp.maximum(segments, -1), 0)


def _padded(segments: Any, lengths: Any, indices: Any) -> Any:
    indices = jnp.arange(indices, dtype=jnp.int32) if isinstance(indices, int) else indices
    segments = jnp.zeros((1, len(indices)), jnp.int32) if segments is None else segments
    return segments if lengths is None else jnp.where(indices[None] < lengths[:, None], segments, -1)
