"""Ways to say a mask. Each is a `MaskInfo` constructor, documented where it is public, in `info`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ejkernel.errors import invalid
from ejkernel.masks import _checks
from ejkernel.masks._parts import Mask

Alignment = Literal["top_left", "bottom_right"]


def either(ours: str, our_value: Any, theirs: str, their_value: Any) -> Any:
    """One value under two spellings; saying both is an error."""
    if our_value is not None and their_value is not None:
        raise invalid(f"{ours} and {theirs}", "both", "one of them")
    return our_value if their_value is None else their_value


def from_attention_mask(cls: Callable[..., Mask], mask: Any, **fields: Any) -> Mask:
    array = _checks.boolean("attention_mask", mask)
    if len(array.shape) == 2:
        segments = padding_segments("attention_mask", array)
        return cls(query_segments=segments, key_segments=segments, **fields)
    if len(array.shape) == 3:
        array = array[:, None]
    if len(array.shape) != 4:
        raise invalid(
            "attention_mask", f"shape {tuple(array.shape)}", "[batch, key], [batch, query, key] or [batch, head, query, key]"
        )
    return cls(dense=array, **fields)


def padding_segments(name: str, mask: Any) -> Any:
    """Segments of a padding mask: 0 for tokens, -1 for padding."""
    return jnp.where(_checks.boolean(name, mask), 0, -1).astype(jnp.int32)


def packed_segments(cu_seqlens: Any, total: int) -> tuple[Any, Any]:
    """Sequence of every packed token and its position there, `[1, total]`; -1 past the last sequence."""
    token = jnp.arange(total, dtype=jnp.int32)
    sequence = jnp.searchsorted(cu_seqlens[1:], token, side="right").astype(jnp.int32)
    inside = token < cu_seqlens[-1]
    start = cu_seqlens[jnp.minimum(sequence, cu_seqlens.shape[0] - 1)]
    return jnp.where(inside, sequence, -1)[None], jnp.where(inside, token - start, -1)[None]


def from_cu_seqlens(
    cls: Callable[..., Mask],
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    total_length: int | None,
    total_key_length: int | None,
    causal_alignment: Alignment,
    **fields: Any,
) -> Mask:
    if causal_alignment not in ("top_left", "bottom_right"):
        raise invalid("causal_alignment", repr(causal_alignment), "'top_left' or 'bottom_right'")
    queries = _checks.cumulative("cu_seqlens_q", cu_seqlens_q)
    keys = queries if cu_seqlens_k is None else _checks.cumulative("cu_seqlens_k", cu_seqlens_k)
    _checks.agree(
        "number of sequences", [("cu_seqlens_q", queries.shape[0] - 1, False), ("cu_seqlens_k", keys.shape[0] - 1, False)]
    )
    total_q = _checks.static_total("cu_seqlens_q", queries, total_length)
    total_k = _checks.static_total("cu_seqlens_k", keys, total_length if total_key_length is None else total_key_length)
    query_segments, query_positions = packed_segments(queries, total_q)
    key_segments, key_positions = packed_segments(keys, total_k)
    if causal_alignment == "bottom_right":
        longer = jnp.diff(keys) - jnp.diff(queries)
        shift = jnp.concatenate([longer, jnp.zeros((1,), jnp.int32)])[query_segments]  # -1, padding, reads the zero
        query_positions = query_positions + shift
    return cls(
        query_segments=query_segments,
        key_segments=key_segments,
        query_positions=query_positions,
        key_positions=key_positions,
        **fields,
    )


def from_lengths(
    cls: Callable[..., Mask], lengths: Any, max_length: int, *, key_lengths: Any, key_max_length: int | None, **fields: Any
) -> Mask:
    queries = _checks.integers("lengths", lengths, "batch")
    keys = queries if key_lengths is None else _checks.integers("key_lengths", key_lengths, "batch")
    size = _checks.integer("max_length", max_length, 0)
    key_size = size if key_max_length is None else _checks.integer("key_max_length", key_max_length, 0)
    for name, array, most in (("lengths", queries, size), ("key_lengths", keys, key_size)):
        if _checks.is_concrete(array) and array.size and not 0 <= int(array.min()) <= int(array.max()) <= most:
            raise invalid(name, [int(n) for n in array], f"values in [0, {most}]")
    return cls(query_lengths=queries, key_lengths=keys, sizes=(None, size, key_size), **fields)


def from_prefix_lengths(cls: Callable[..., Mask], prefix_lengths: Any, q_len: int, kv_len: int | None, **fields: Any) -> Mask:
    """Keys of the prefix stand at position 0, which no causal query is before."""
    prefixes = _checks.integers("prefix_lengths", prefix_lengths, "batch")
    queries = _checks.integer("q_len", q_len, 0)
    keys = queries if kv_len is None else _checks.integer("kv_len", kv_len, 0)
    if _checks.is_concrete(prefixes) and prefixes.size and not 0 <= int(prefixes.min()) <= int(prefixes.max()) <= keys:
        raise invalid("prefix_lengths", [int(n) for n in prefixes], f"values in [0, {keys}]")
    for name in ("query_positions", "key_positions", "causal", "prefix", "window", "chunk_size"):
        if fields.get(name) is not None:
            raise invalid(
                name, fields[name], "None", remedy="a prefix of each row is said with positions, which it would compare"
            )
    if fields.get("causal_offset", 0) < 0:
        raise invalid("causal_offset", fields["causal_offset"], "a value >= 0")
    index = jnp.arange(keys, dtype=jnp.int32)[None]
    positions = jnp.where(index < prefixes[:, None], 0, index)
    return cls(key_positions=positions, causal=True, **{**fields, "sizes": (None, queries, None)})


def from_random(
    cls: Callable[..., Mask],
    batch_size: int,
    q_len: int,
    kv_len: int | None,
    sparsity: float,
    seed: int,
    key: Any,
    **fields: Any,
) -> Mask:
    if not 0 <= sparsity <= 1:
        raise invalid("sparsity", sparsity, "a fraction in [0, 1]")
    keys = q_len if kv_len is None else kv_len
    chosen = jax.random.key(seed) if key is None else key
    seen = jax.random.uniform(chosen, (batch_size, 1, q_len, keys)) >= sparsity
    diagonal = jnp.arange(keys)[None] == (jnp.arange(q_len) * keys // max(q_len, 1))[:, None]
    return cls(dense=seen | diagonal[None, None], **fields)


def dynamic_init(cls: Callable[..., Mask], mask_info: Any, input_ids: Any, inputs_embeds: Any, attention_mask: Any) -> Mask:
    if mask_info is not None:
        return mask_info
    if attention_mask is not None:
        return from_attention_mask(cls, attention_mask)
    source = input_ids if input_ids is not None else inputs_embeds
    if source is None:
        raise invalid("mask_info, input_ids, inputs_embeds, attention_mask", "None", "one of them")
    if len(source.shape) < 2:
        raise invalid("input_ids or inputs_embeds", f"shape {tuple(source.shape)}", "[batch, token, ...]")
    batch, length = source.shape[:2]
    return cls(sizes=(batch, length, length))
