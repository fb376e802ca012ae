"""`MaskInfo`: an immutable description of who sees whom in attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Self

import jax
import jax.numpy as jnp

from ejkernel.errors import invalid
from ejkernel.masks import _apply, _checks, _construct, _derive, _materialise, _sizes, _visualise
from ejkernel.masks._parts import CAUSAL_NAME, CausalName
from ejkernel.masks._spellings import AxisName, Spellings

ARRAYS = (
    "dense",
    "query_segments",
    "key_segments",
    "query_positions",
    "key_positions",
    "query_lengths",
    "key_lengths",
)
"""Fields that are pytree leaves; every other field is static."""


@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class MaskInfo(Spellings):
    """Visibility of keys to queries, kept in the parts in which it was said.

    Query i of example b sees key j in head h if *every* part that was given agrees. With p = query_positions[b, i] (i if not
    given) + causal_offset and r = key_positions[b, j] (j if not given):

    - `dense[b, h, i, j]`;
    - `query_segments[b, i] == key_segments[b, j]`, neither negative; one side alone only marks its own padding;
    - `i < query_lengths[b]` and `j < key_lengths[b]`;
    - `causal`: `r <= p`, or `r < prefix`;
    - `window = (left, right)`: `p - left <= r <= p + right`, both sides inclusive, None unlimited; an int w means (w, w);
    - `chunk_size`: `p // chunk_size == r // chunk_size`.

    Nothing is stored that was not said, and reading a property changes nothing. Other spellings (`q_segment_ids`,
    `attention_mask`, ...) are views, computed when read. It is a pytree: arrays are leaves, all else is static.

    >>> info = MaskInfo.from_segments([[0, 0, 1, -1]]).apply_causal()
    >>> info.attention_mask[0, 0].astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]

    Attributes:
        dense: bool `[B|1, H|1, T|1, S|1]`, True = visible.
        query_segments: int32 `[B|1, T]`; negative = padding, and only negative: 0 is a segment like any other.
        key_segments: int32 `[B|1, S]`.
        query_positions: int32 `[B|1, T]`.
        key_positions: int32 `[B|1, S]`.
        query_lengths: int32 `[B|1]`.
        key_lengths: int32 `[B|1]`.
        sizes: (B, T, S) where no array tells them; only used to materialise.
        sliding_window_baked_in: a client's note that its window is in this mask already; no part of visibility.
        attention_mask_dtype: the dtype in which `attention_mask` is read, by its name.
        batch_axis_name: mesh axes over which B is sharded; likewise for query heads, key heads and the sequence.
    """

    dense: Any = None
    query_segments: Any = None
    key_segments: Any = None
    query_positions: Any = None
    key_positions: Any = None
    query_lengths: Any = None
    key_lengths: Any = None
    causal: CausalName = CAUSAL_NAME
    causal_offset: int = 0
    window: _checks.Window | None = None
    chunk_size: int | None = None
    prefix: int | None = None
    sizes: tuple[int | None, int | None, int | None] = (None, None, None)
    sliding_window_baked_in: bool = False
    attention_mask_dtype: str = "bool"
    batch_axis_name: AxisName = ("dp", "fsdp")
    qheads_axis_name: AxisName = "tp"
    kvheads_axis_name: AxisName = "tp"
    sequence_axis_name: AxisName = "sp"

    def __init__(
        self,
        dense: Any = None,
        query_segments: Any = None,
        key_segments: Any = None,
        query_positions: Any = None,
        key_positions: Any = None,
        query_lengths: Any = None,
        key_lengths: Any = None,
        *,
        causal: bool = False,
        causal_offset: int = 0,
        window: int | tuple[int | None, int | None] | None = None,
        chunk_size: int | None = None,
        prefix: int | None = None,
        sizes: tuple[int | None, int | None, int | None] = (None, None, None),
        sliding_window_baked_in: bool = False,
        attention_mask_dtype: Any = "bool",
        batch_axis_name: AxisName = ("dp", "fsdp"),
        qheads_axis_name: AxisName = "tp",
        kvheads_axis_name: AxisName = "tp",
        sequence_axis_name: AxisName = "sp",
        _attention_mask: Any = None,
        q_positions: Any = None,
        kv_positions: Any = None,
    ) -> None:
        """Check and keep the parts. `_attention_mask`, `q_positions` and `kv_positions` are other spellings."""
        query_positions = _construct.either("query_positions", query_positions, "q_positions", q_positions)
        key_positions = _construct.either("key_positions", key_positions, "kv_positions", kv_positions)
        values = {
            "dense": _checks.dense(_construct.either("dense", dense, "_attention_mask", _attention_mask)),
            "query_segments": _checks.integers("query_segments", query_segments, "batch query"),
            "key_segments": _checks.integers("key_segments", key_segments, "batch key"),
            "query_positions": _checks.integers("query_positions", query_positions, "batch query"),
            "key_positions": _checks.integers("key_positions", key_positions, "batch key"),
            "query_lengths": _checks.integers("query_lengths", query_lengths, "batch"),
            "key_lengths": _checks.integers("key_lengths", key_lengths, "batch"),
            "causal": bool(causal),
            "causal_offset": _checks.integer("causal_offset", causal_offset),
            "window": _checks.window(window),
            "chunk_size": None if chunk_size is None else _checks.integer("chunk_size", chunk_size, 1),
            "prefix": None if prefix is None else _checks.integer("prefix", prefix, 0),
            "sizes": tuple(None if size is None else _checks.integer("sizes", size, 0) for size in sizes),
            "sliding_window_baked_in": bool(sliding_window_baked_in),
            "attention_mask_dtype": jnp.dtype(attention_mask_dtype).name,
            "batch_axis_name": _axis(batch_axis_name),
            "qheads_axis_name": _axis(qheads_axis_name),
            "kvheads_axis_name": _axis(kvheads_axis_name),
            "sequence_axis_name": _axis(sequence_axis_name),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        _sizes.check(self, ARRAYS)
        object.__setattr__(self, "sizes", _sizes.not_told_by_arrays(self, ARRAYS))

    # Constructors

    @classmethod
    def from_segments(
        cls,
        query_segments: Any = None,
        key_segments: Any = None,
        *,
        query_positions: Any = None,
        key_positions: Any = None,
        q_segment_ids: Any = None,
        kv_segment_ids: Any = None,
        is_attn_mask: bool = False,
        **fields: Any,
    ) -> MaskInfo:
        """Tokens see each other within equal segments.

        Args:
            query_segments: integers `[B, T]`; negative = padding.
            key_segments: `[B, S]`; the queries' segments if left out (self-attention).
            query_positions: `[B, T]`, what causal, window and chunk masks compare; indices if left out.
            key_positions: `[B, S]`.
            q_segment_ids: another spelling of `query_segments`; likewise `kv_segment_ids`.
            is_attn_mask: the segments are padding masks: 1 is a token, 0 is padding.
            **fields: any other field of `MaskInfo`, also as `q_positions` or `kv_positions`.
        """
        queries = _construct.either("query_segments", query_segments, "q_segment_ids", q_segment_ids)
        keys = _construct.either("key_segments", key_segments, "kv_segment_ids", kv_segment_ids)
        if queries is None:
            raise invalid("query_segments", None, "integers [batch, query]")
        keys = queries if keys is None else keys
        if is_attn_mask:
            queries, keys = (_construct.padding_segments("query_segments", mask) for mask in (queries, keys))
        return cls(
            query_segments=queries,
            key_segments=keys,
            query_positions=query_positions,
            key_positions=key_positions,
            **fields,
        )

    @classmethod
    def from_attention_mask(
        cls, attention_mask: Any, q_positions: Any = None, kv_positions: Any = None, **fields: Any
    ) -> MaskInfo:
        """From a mask of booleans or of integers 0 and 1 (floating masks are refused: additive values are a bias).

        Args:
            attention_mask: `[B, S]` marks the valid tokens of self-attention (kept as segments 0 and -1);
                `[B, T, S]` or `[B, H, T, S]` is kept as it is.
            q_positions: `[B, T]`; likewise `kv_positions` `[B, S]`.
            **fields: any other field of `MaskInfo`.
        """
        positions = {"q_positions": q_positions, "kv_positions": kv_positions}
        return _construct.from_attention_mask(cls, attention_mask, **positions, **fields)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any = None,
        *,
        total_length: int | None = None,
        total_key_length: int | None = None,
        causal_alignment: _construct.Alignment = "top_left",
        **fields: Any,
    ) -> MaskInfo:
        """Sequences packed along one axis, B = 1; positions restart in each.

        Args:
            cu_seqlens_q: `[n + 1]` = [0, l1, l1 + l2, ...]; sequences of length 0 are fine.
            cu_seqlens_k: the same for keys; the queries' if left out.
            total_length: size of the packed axis, needed under tracing; tokens past the last sequence are padding.
            total_key_length: size of the packed keys; `total_length` if left out.
            causal_alignment: "bottom_right" puts each sequence's last query at its last key.
            **fields: any other field of `MaskInfo`, e.g. `causal=True`.
        """
        return _construct.from_cu_seqlens(
            cls,
            cu_seqlens_q,
            cu_seqlens_k,
            total_length=total_length,
            total_key_length=total_key_length,
            causal_alignment=causal_alignment,
            **fields,
        )

    @classmethod
    def from_lengths(
        cls, lengths: Any, max_length: int, *, key_lengths: Any = None, key_max_length: int | None = None, **fields: Any
    ) -> MaskInfo:
        """Right-padded sequences: `lengths` `[B]` of `max_length`; the keys' are the same unless given."""
        return _construct.from_lengths(
            cls, lengths, max_length, key_lengths=key_lengths, key_max_length=key_max_length, **fields
        )

    @classmethod
    def from_prefix_lengths(cls, prefix_lengths: Any, q_len: int, kv_len: int | None = None, **fields: Any) -> MaskInfo:
        """Causal, but every query sees the first `prefix_lengths[b]` keys of its row (`[B]`, may be traced): a prefix LM.

        Of fields, none that compares positions (window, chunk_size, ...).
        """
        return _construct.from_prefix_lengths(cls, prefix_lengths, q_len, kv_len, **fields)

    @classmethod
    def from_random(
        cls,
        batch_size: int,
        q_len: int,
        kv_len: int | None = None,
        sparsity: float = 0.5,
        seed: int = 0,
        *,
        key: Any = None,
        **fields: Any,
    ) -> MaskInfo:
        """A random dense mask `[B, 1, T, S]` hiding a fraction `sparsity`; every query still sees the key on its diagonal."""
        return _construct.from_random(cls, batch_size, q_len, kv_len, sparsity, seed, key, **fields)

    @classmethod
    def dynamic_init(
        cls, *, mask_info: MaskInfo | None = None, input_ids: Any = None, inputs_embeds: Any = None, attention_mask: Any = None
    ) -> MaskInfo:
        """The first that is given: `mask_info` itself, `attention_mask`, or no restriction on `input_ids` / `inputs_embeds`."""
        return _construct.dynamic_init(cls, mask_info, input_ids, inputs_embeds, attention_mask)

    def replace(
        self,
        *,
        attention_mask: Any = None,
        q_segment_ids: Any = None,
        kv_segment_ids: Any = None,
        q_positions: Any = None,
        kv_positions: Any = None,
        **fields: Any,
    ) -> Self:
        """A copy with other fields.

        Names of fields are set as given, None included. The named spellings ignore None, and `attention_mask` replaces what
        `info.attention_mask` reads: dense, structure and lengths give way to it; segments and positions stay where they fit.
        """
        changes = dict(fields)
        if attention_mask is not None:
            changes = _standing_for(self, attention_mask) | changes
        spelled = {
            "query_segments": q_segment_ids,
            "key_segments": kv_segment_ids,
            "query_positions": q_positions,
            "key_positions": kv_positions,
        }
        changes |= {name: value for name, value in spelled.items() if value is not None}
        return dataclasses.replace(self, **changes)

    # Sizes

    @property
    def batch_size(self) -> int | None:
        """B if anything says so."""
        sizes = [array.shape[0] for name in ARRAYS if (array := getattr(self, name)) is not None]
        unsaid = self.sizes[0] if self.sizes[0] is not None else (1 if sizes else None)
        return next((size for size in sizes if size != 1), unsaid)

    @property
    def q_len(self) -> int | None:
        """T if anything says so; a dense mask that broadcasts over queries says 1."""
        return _sizes.last_axis(self.query_segments, self.query_positions, self.sizes[1], self.dense, -2)

    @property
    def kv_len(self) -> int | None:
        """S if anything says so."""
        return _sizes.last_axis(self.key_segments, self.key_positions, self.sizes[2], self.dense, -1)

    @property
    def shape(self) -> tuple[int | None, int | None, int | None]:
        """(B, T, S)."""
        return self.batch_size, self.q_len, self.kv_len

    def known_sizes(self, purpose: str) -> tuple[int, int]:
        """(T, S), or an error that says how to give them."""
        return _sizes.both(purpose, self.q_len, self.kv_len)

    # Views

    def materialize(self, query_length: int | None = None, key_length: int | None = None) -> Any:
        """Everything that was said as one bool `[B|1, H|1, T, S]`."""
        queries = self.q_len if query_length is None else query_length
        keys = self.kv_len if key_length is None else key_length
        return _materialise.visibility(self, *_sizes.both("materialize", queries, keys))

    @property
    def attention_mask(self) -> Any:
        """`materialize()` over the known batch, in `attention_mask_dtype`; None if nothing was said at all."""
        if self.shape == (None, None, None) and not _apply.structured(self):
            return None
        mask = self.materialize()
        return jnp.broadcast_to(mask, (self.batch_size or mask.shape[0], *mask.shape[1:])).astype(self.attention_mask_dtype)

    def get_or_compute_attention_mask(self, dtype: Any = jnp.bool_) -> Any:
        """`attention_mask` in `dtype`; an error where it is unknown."""
        self.known_sizes("get_or_compute_attention_mask")
        return self.attention_mask.astype(dtype)

    @property
    def bias(self) -> Any:
        """`create_bias()`."""
        return self.create_bias()

    def create_bias(self, dtype: Any = jnp.float32) -> Any:
        """Additive form: 0 where visible, the most negative finite number of `dtype` elsewhere."""
        return jnp.where(self.get_or_compute_attention_mask(), 0, jnp.finfo(dtype).min).astype(dtype)

    def materialize_segment_ids(self) -> MaskInfo:
        """The same visibility with both segment ids stored; those read from a dense mask only mark padding."""
        self.known_sizes("materialize_segment_ids")
        if self.query_segments is None and self.key_segments is None:
            return self.replace(query_segments=self.q_segment_ids, key_segments=self.kv_segment_ids)
        queries, keys = _derive.both_segments(self, *self.known_sizes("materialize_segment_ids"))
        return self.replace(query_segments=queries, key_segments=keys)

    def resolved(self, query_length: int, key_length: int) -> MaskInfo:
        """The same mask in the parts that kernels take: no lengths; segments, and positions, on both sides or neither.

        Where there are positions, `causal_offset` is folded into them.
        """
        return _derive.resolved(self, query_length, key_length)

    # Restrictions

    def apply_causal(self, offset: Any = 0) -> MaskInfo:
        """Also require key position <= query position + offset.

        Args:
            offset: an int stays static structure; a JAX array (one, or `[B]`), or an int that differs from other
                structure's offset, becomes part of the dense mask.
        """
        return _apply.apply_causal(self, offset)

    def apply_sliding_window(
        self, sliding_window: Any, *, offset: Any = 0, mode: _apply.WindowMode | None = None, index: Any = None
    ) -> MaskInfo:
        """Also require the key within the window; an int w means (w, w), inclusive, and None changes nothing.

        Args:
            sliding_window: w or (left, right); a side that is a JAX array becomes part of the dense mask.
            offset: see `apply_causal`.
            mode: "decode" also cuts the mask to query `index` and the `left + right + 1` keys around it, "prefill" to the last w
                keys, or `left + right + 1`; None or "default" cuts nothing. Cuts count indices, whatever the positions are.
            index: of the query, an int or `[B]`, for "decode" alone.
        """
        return _apply.apply_sliding_window(self, sliding_window, offset, mode, index)

    def apply_chunked(self, chunk_size: Any, offset: int = 0) -> MaskInfo:
        """Also require causality, and the query's own chunk of `chunk_size` absolute positions. Segments stay as they are.

        A `chunk_size` that is a JAX array becomes part of the dense mask.
        """
        return _apply.apply_chunked(self, chunk_size, offset)

    def apply_kv_lengths(
        self, kv_lengths: Any, *, q_len: int | None = None, end_index: Any = None, sliding_window: int | None = None
    ) -> MaskInfo:
        """Hide keys at and past `kv_lengths` `[B]`, and cut the mask to what a decode step needs.

        Positions keep the cut mask's causal and window structure exact, so nothing is made dense.

        Args:
            kv_lengths: valid keys per example.
            q_len: keep this many queries, those ending at `end_index`.
            end_index: `[B]`; `kv_lengths` if left out.
            sliding_window: keep this many keys, those ending at `end_index`: the key axis is cut.
        """
        return _apply.apply_kv_lengths(self, kv_lengths, q_len=q_len, end_index=end_index, sliding_window=sliding_window)

    def apply_token_type_ids(
        self,
        token_type_ids: Any,
        *,
        combine: _apply.Combine = "union",
        zero_policy: _apply.ZeroPolicy = "q",
        update_segment_ids: bool = False,
    ) -> MaskInfo:
        """Combine with "query and key have the same type".

        Args:
            token_type_ids: `[B, T]`, or a pair of query and key types.
            combine: "union" opens equal types to each other *within* segments and lengths, so padding stays hidden;
                "intersect" also requires equal types; "replace" keeps nothing else.
            zero_policy: on which side type 0 matches nothing: "q", "kv", "both" or "none".
            update_segment_ids: has no effect: segments say what was said of them, and types become part of the dense mask.
        """
        return _apply.apply_token_type_ids(self, token_type_ids, combine=combine, zero_policy=zero_policy)

    # Text

    def visualize(
        self,
        query_length: int | None = None,
        key_length: int | None = None,
        *,
        batch: int = 0,
        head: int = 0,
        max_rows: int = 32,
        max_cols: int = 32,
        compact: bool = False,
    ) -> str:
        """The mask as text: 0/1 with row and column numbers, sampled evenly where it is larger than `max_rows` by `max_cols`.

        `compact=True` is one character per cell, each standing for a block: `#` all visible, `+` some, `.` none.
        """
        return _visualise.visualise(
            self, query_length, key_length, batch=batch, head=head, max_rows=max_rows, max_cols=max_cols, compact=compact
        )

    def __repr__(self) -> str:
        return _visualise.summary(self)

    def _repr_html_(self) -> str:
        return _visualise.as_html(self)


def _axis(name: Any) -> AxisName:
    return tuple(name) if isinstance(name, (list, tuple)) else name


def _standing_for(info: MaskInfo, attention_mask: Any) -> dict[str, Any]:
    """Changes that make `attention_mask` all that is said besides segments and positions of the same size."""
    dense = _construct.from_attention_mask(MaskInfo, attention_mask)
    if dense.dense is None:
        raise invalid(
            "attention_mask", "[batch, key]", "[batch, query, key] or [batch, head, query, key]", remedy="set segments"
        )
    changes: dict[str, Any] = {"dense": dense.dense, "query_lengths": None, "key_lengths": None, **_apply.PLAIN}
    changes["sizes"] = (info.sizes[0], dense.dense.shape[2], dense.dense.shape[3])
    for name, axis in (("query_segments", 2), ("query_positions", 2), ("key_segments", 3), ("key_positions", 3)):
        array = getattr(info, name)
        if array is not None and array.shape[1] != dense.dense.shape[axis]:
            changes[name] = None
    return changes


STATIC = tuple(field.name for field in dataclasses.fields(MaskInfo) if field.name not in ARRAYS)


def _flatten(info: MaskInfo) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tuple(getattr(info, name) for name in ARRAYS), tuple(getattr(info, name) for name in STATIC)


def _flatten_with_keys(info: MaskInfo) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
    arrays, static = _flatten(info)
    return tuple((jax.tree_util.GetAttrKey(name), array) for name, array in zip(ARRAYS, arrays, strict=True)), static


def _unflatten(static: tuple[Any, ...], arrays: Iterable[Any]) -> MaskInfo:
    """Without checks: JAX puts placeholders, specs and batched arrays where arrays were."""
    info = object.__new__(MaskInfo)
    for name, value in zip((*ARRAYS, *STATIC), (*arrays, *static), strict=True):
        object.__setattr__(info, name, value)
    return info


jax.tree_util.register_pytree_with_keys(MaskInfo, _flatten_with_keys, _unflatten, _flatten)
