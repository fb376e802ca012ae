"""Packed sequences: indices of sequences that lie one after another along one axis, and cumulative sums that respect them.

`cu_seqlens` are the standard cumulative lengths `[n + 1]` = [0, l1, l1 + l2, ...]; empty sequences are allowed and keep their
number. Under tracing the packed length cannot be read from them: say it with the static `total_length`; entries past the last
sequence are then -1 (indices) or 0 (sums). The names are those of flash-linear-attention's index utilities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.errors import invalid, wrong_type
from ejkernel.masks import _checks, _construct
from ejkernel.utils.dtypes import accumulator
from ejkernel.utils.sizes import cdiv

__all__ = [
    "cdiv",
    "chunk_global_cumsum",
    "chunk_local_cumsum",
    "identity_dtype_convert",
    "prepare_chunk_indices",
    "prepare_chunk_offsets",
    "prepare_cu_seqlens_from_mask",
    "prepare_lens",
    "prepare_lens_from_mask",
    "prepare_position_ids",
    "prepare_sequence_ids",
    "prepare_token_indices",
    "reorder_sequence",
]


def prepare_lens(cu_seqlens: Any) -> Any:
    """Length of each sequence, `[n]`.

    >>> prepare_lens([0, 2, 2, 5]).tolist()
    [2, 0, 3]
    """
    return jnp.diff(_checks.cumulative("cu_seqlens", cu_seqlens))


def prepare_lens_from_mask(mask: Any) -> Any:
    """Number of True (or 1) entries along the last axis, int32.

    >>> prepare_lens_from_mask([[1, 1, 0], [1, 0, 0]]).tolist()
    [2, 1]
    """
    return _checks.boolean("mask", mask).sum(axis=-1, dtype=jnp.int32)


def prepare_cu_seqlens_from_mask(mask: Any, out_dtype: Any = jnp.int32) -> Any:
    """Cumulative lengths `[B + 1]` of the True (or 1) entries of `[B, T]`.

    >>> prepare_cu_seqlens_from_mask([[1, 1, 0], [1, 0, 0]]).tolist()
    [0, 2, 3]
    """
    lengths = prepare_lens_from_mask(mask)
    if lengths.ndim != 1:
        raise invalid("mask", f"{lengths.ndim + 1} axes", "[batch, token]")
    return jnp.concatenate([jnp.zeros((1,), out_dtype), jnp.cumsum(lengths, dtype=out_dtype)])


def _packed(cu_seqlens: Any, total_length: int | None) -> tuple[Any, Any]:
    """Sequence and position of every packed token."""
    starts = _checks.cumulative("cu_seqlens", cu_seqlens)
    sequences, positions = _construct.packed_segments(starts, _checks.static_total("cu_seqlens", starts, total_length))
    return sequences[0], positions[0]


def prepare_position_ids(cu_seqlens: Any, total_length: int | None = None) -> Any:
    """Position of every packed token in its sequence, `[N]`.

    >>> prepare_position_ids([0, 2, 2, 5], total_length=6).tolist()
    [0, 1, 0, 1, 2, -1]
    """
    return _packed(cu_seqlens, total_length)[1]


def prepare_sequence_ids(cu_seqlens: Any, total_length: int | None = None) -> Any:
    """Sequence of every packed token, `[N]`; an empty sequence keeps its number.

    >>> prepare_sequence_ids([0, 2, 2, 5]).tolist()
    [0, 0, 2, 2, 2]
    """
    return _packed(cu_seqlens, total_length)[0]


def prepare_token_indices(cu_seqlens: Any, total_length: int | None = None) -> Any:
    """(sequence, position) of every packed token, `[N, 2]`.

    >>> prepare_token_indices([0, 1, 3]).tolist()
    [[0, 0], [1, 0], [1, 1]]
    """
    return jnp.stack(_packed(cu_seqlens, total_length), axis=-1)


def prepare_chunk_offsets(cu_seqlens: Any, chunk_size: int) -> Any:
    """Cumulative number of chunks `[n + 1]` when each sequence is cut into chunks of its own.

    >>> prepare_chunk_offsets([0, 5, 5, 8], 2).tolist()
    [0, 3, 3, 5]
    """
    size = _checks.integer("chunk_size", chunk_size, 1)
    counts = cdiv(prepare_lens(cu_seqlens), size)
    return jnp.concatenate([jnp.zeros((1,), counts.dtype), jnp.cumsum(counts)])


def prepare_chunk_indices(cu_seqlens: Any, chunk_size: int, total_length: int | None = None) -> Any:
    """(sequence, chunk in it) of every chunk, `[chunks, 2]`.

    With `total_length` the number of rows is the most that n sequences of that total can need; unused rows are (-1, -1).

    >>> prepare_chunk_indices([0, 5, 5, 8], 2).tolist()
    [[0, 0], [0, 1], [0, 2], [2, 0], [2, 1]]
    """
    offsets = prepare_chunk_offsets(cu_seqlens, chunk_size)
    rows = None
    if total_length is not None:
        sequences = offsets.shape[0] - 1
        total = _checks.integer("total_length", total_length, 0)
        rows = min(total, (total + sequences * (chunk_size - 1)) // chunk_size)
    return prepare_token_indices(offsets, rows)


def identity_dtype_convert(dtype: Any) -> Callable[[Any], Any]:
    """A function that returns its argument, and rounds the gradient to `dtype`.

    The gradient is handed on in the wider of `dtype` and its own dtype. So float32 over a bfloat16 argument gives float32
    gradients: whatever computed that argument must take them, as parameters do.

    >>> f = identity_dtype_convert(jnp.bfloat16)
    >>> float(jax.grad(lambda x: f(x) * 1.001)(1.0))
    1.0
    >>> g = identity_dtype_convert(jnp.float32)
    >>> jax.grad(lambda x: g(x).astype(jnp.float32))(jnp.bfloat16(1)).dtype.name
    'float32'
    """

    @jax.custom_vjp
    def identity(x: Any) -> Any:
        return x

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        wider = jnp.finfo(dtype).bits > jnp.finfo(cotangent.dtype).bits
        return (cotangent.astype(dtype) if wider else cotangent.astype(dtype).astype(cotangent.dtype),)

    identity.defvjp(lambda x: (x, None), backward)
    return identity


def chunk_local_cumsum(
    g: Any,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Any = None,
    head_first: bool = False,
    output_dtype: Any = None,
    *,
    softmax_scale: float | None = None,
) -> Any:
    """Cumulative sum along time that restarts every `chunk_size` tokens (of each sequence), in float32 inside.

    Args:
        g: floating `[B, T, H]` or `[B, T, H, D]`; `[B, H, T]` or `[B, H, T, D]` if `head_first`.
        chunk_size: tokens per chunk.
        reverse: sum from the token to the end of its chunk.
        scale: factor on the sums; `softmax_scale` is another spelling.
        cu_seqlens: sequences packed along T, then B = 1; chunks start anew in each, tokens past the last give 0.
        head_first: see g.
        output_dtype: g's dtype if left out.

    >>> chunk_local_cumsum(jnp.ones((1, 5, 1)), 2)[0, :, 0].tolist()
    [1.0, 2.0, 1.0, 2.0, 1.0]
    """
    size = _checks.integer("chunk_size", chunk_size, 1)
    return _restarting_sum(g, size, reverse, _one_scale(scale, softmax_scale), cu_seqlens, head_first, output_dtype)


def chunk_global_cumsum(
    s: Any,
    reverse: bool = False,
    cu_seqlens: Any = None,
    scale: float | None = None,
    head_first: bool = False,
    output_dtype: Any = None,
    *,
    softmax_scale: float | None = None,
) -> Any:
    """Cumulative sum along time, restarting at each packed sequence. Arguments as in `chunk_local_cumsum`.

    >>> chunk_global_cumsum(jnp.ones((1, 5, 1)), cu_seqlens=[0, 2, 5], reverse=True)[0, :, 0].tolist()
    [2.0, 1.0, 3.0, 2.0, 1.0]
    """
    return _restarting_sum(s, None, reverse, _one_scale(scale, softmax_scale), cu_seqlens, head_first, output_dtype)


def _one_scale(scale: float | None, softmax_scale: float | None) -> float | None:
    return _construct.either("scale", scale, "softmax_scale", softmax_scale)


def _restarting_sum(
    values: Any,
    chunk_size: int | None,
    reverse: bool,
    scale: float | None,
    cu_seqlens: Any,
    head_first: bool,
    output_dtype: Any,
) -> Any:
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise wrong_type("g", f"dtype {values.dtype}", "a floating type")
    if values.ndim not in (3, 4):
        raise invalid("g", f"shape {tuple(values.shape)}", "[batch, time, head] or [batch, time, head, channel], or head first")
    axis = 2 if head_first else 1
    summed = jnp.moveaxis(values.astype(accumulator(values.dtype)), axis, 0)
    if cu_seqlens is None:
        summed = _plain_sum(summed, chunk_size, reverse)
    else:
        if values.shape[0] != 1:
            raise invalid("g", f"batch {values.shape[0]}", "batch 1 with cu_seqlens", remedy="pack the sequences along time")
        sequences, positions = _packed(cu_seqlens, values.shape[axis])
        chunk = jnp.zeros_like(positions) if chunk_size is None else positions // chunk_size
        summed = _segmented_sum(summed, jnp.stack([sequences, chunk]), sequences >= 0, reverse)
    if scale is not None:
        summed = summed * scale
    return jnp.moveaxis(summed, 0, axis).astype(values.dtype if output_dtype is None else output_dtype)


def _plain_sum(values: Any, chunk_size: int | None, reverse: bool) -> Any:
    length = values.shape[0]
    size = length if chunk_size is None else chunk_size
    if length == 0:
        return values
    padded = jnp.pad(values, [(0, -length % size)] + [(0, 0)] * (values.ndim - 1))
    return jax.lax.cumsum(padded.reshape(-1, size, *values.shape[1:]), axis=1, reverse=reverse).reshape(padded.shape)[:length]


def _segmented_sum(values: Any, groups: Any, valid: Any, reverse: bool) -> Any:
    """Inclusive sum within runs of equal `groups`. A scan with resets, since subtracting the sum before a run would cancel."""
    edge = jnp.ones((1,), bool)
    changes = (groups[:, 1:] != groups[:, :-1]).any(axis=0)
    starts = jnp.concatenate([changes, edge]) if reverse else jnp.concatenate([edge, changes])
    column = (-1,) + (1,) * (values.ndim - 1)
    values = jnp.where(valid.reshape(column), values, 0)
    if values.shape[0] == 0:
        return values

    def join(before: tuple[Any, Any], after: tuple[Any, Any]) -> tuple[Any, Any]:
        return before[0] | after[0], jnp.where(after[0], after[1], before[1] + after[1])

    return jax.lax.associative_scan(join, (starts.reshape(column), values), reverse=reverse)[1]


def reorder_sequence(
    x: Any, num_shards: int, *, axis: int = 1, strategy: Literal["zigzag", "striped"] = "zigzag", inverse: bool = False
) -> Any:
    """Order tokens so that equal shards of the axis carry equal causal work.

    "zigzag" cuts the axis into 2 n pieces and gives shard i the pieces i and 2 n - 1 - i; "striped" gives shard i the tokens
    i, i + n, i + 2 n, ... `inverse=True` restores the original order. (Ring attention, Liu et al. 2023; striped attention,
    Brandon et al. 2023.)

    >>> reorder_sequence(jnp.arange(8)[None], 2)[0].tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    >>> reorder_sequence(jnp.arange(8)[None], 2, strategy="striped")[0].tolist()
    [0, 2, 4, 6, 1, 3, 5, 7]
    """
    shards = _checks.integer("num_shards", num_shards, 1)
    if strategy not in ("zigzag", "striped"):
        raise invalid("strategy", repr(strategy), "'zigzag' or 'striped'")
    if not -x.ndim <= axis < x.ndim:
        raise invalid("axis", axis, f"a value in [{-x.ndim}, {x.ndim - 1}]")
    length, pieces = x.shape[axis], 2 * shards if strategy == "zigzag" else shards
    if length % pieces:
        raise invalid("x", f"length {length} along axis {axis}", f"a multiple of {pieces}", remedy="pad the sequence")
    tokens = np.arange(length)
    if strategy == "striped":
        order = tokens.reshape(-1, shards).T.reshape(-1)
    else:
        halves = np.stack([np.arange(shards), 2 * shards - 1 - np.arange(shards)], axis=1).reshape(-1)
        order = tokens.reshape(pieces, -1)[halves].reshape(-1)
    return jnp.take(x, jnp.asarray(np.argsort(order) if inverse else order), axis=axis)
