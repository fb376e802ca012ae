"""Checks of packed sequences, `cu_seqlens [n + 1]` or segment ids `[B or 1, T]`, that several operations share."""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ejkernel.errors import invalid, wrong_type
from ejkernel.utils.checks import check_array
from ejkernel.utils.integers import as_int32


def check_packed(cu_seqlens: Any, name: str, batch: int) -> None:
    """Refuse what is not integers `[n + 1]` beside an array `name` of batch 1."""
    check_array("cu_seqlens", cu_seqlens, ndim=1, floating=False)
    if not jnp.issubdtype(cu_seqlens.dtype, jnp.integer):
        raise wrong_type("cu_seqlens", f"dtype {cu_seqlens.dtype}", "integers")
    if cu_seqlens.shape[0] < 1:
        raise invalid("cu_seqlens", "no element", "[n + 1], so at least one")
    if batch != 1:
        raise invalid(name, f"batch {batch}", "batch 1 with cu_seqlens", remedy="pack the sequences along T")


def as_bounds(cu_seqlens: Any) -> Any:
    """cu_seqlens as the canonical int32 `[1, n + 1]`."""
    return as_int32(cu_seqlens)[None]


def check_segments(seg_ids: Any, batch: int, length: int) -> None:
    """Refuse what is not integers `[B,T]` or `[1,T]`."""
    check_array("seg_ids", seg_ids, ndim=2, floating=False)
    if not jnp.issubdtype(seg_ids.dtype, jnp.integer):
        raise wrong_type("seg_ids", f"dtype {seg_ids.dtype}", "integers")
    if tuple(seg_ids.shape) not in ((batch, length), (1, length)):
        raise invalid("seg_ids", f"shape {tuple(seg_ids.shape)}", f"{(batch, length)} or {(1, length)} = [batch or 1, length]")


def check_bounds(cu_seqlens: Any, name: str, array: Any) -> None:
    """Refuse concrete cu_seqlens that decrease, do not start at 0 or end beyond the length of an array `[B,T,...]`."""
    if cu_seqlens is None or array is None or isinstance(cu_seqlens, jax.core.Tracer):
        return
    values = np.asarray(cu_seqlens)
    if values.ndim != 1 or values.size == 0 or getattr(array, "ndim", 0) < 2:
        return
    if values[0] != 0 or values[-1] > array.shape[1] or (np.diff(values) < 0).any():
        raise invalid(
            "cu_seqlens", values, f"values that do not decrease, from 0 to at most {array.shape[1]} = length of {name}"
        )


def taking_part(seg_ids: Any, cu_seqlens: Any, array: Any, name: str) -> Any:
    """Which tokens of an array `[B,T,...]` of this name take part, `[1 or B, T]`; None for all."""
    if seg_ids is None and cu_seqlens is None:
        return None
    if seg_ids is None:
        check_packed(cu_seqlens, name, array.shape[0])
        return (jnp.arange(array.shape[1], dtype=jnp.int32) < as_int32(cu_seqlens)[-1])[None]
    if cu_seqlens is not None:
        raise invalid("seg_ids", "an array", "None beside cu_seqlens", remedy="say with one of them where sequences end")
    check_segments(seg_ids, *array.shape[:2])
    return jnp.asarray(seg_ids) >= 0


def first_tokens(cu_seqlens: Any, length: int) -> tuple[Any, Any]:
    """Of T tokens, which sequence each is of, `[T]`, n after the last one, and whether it is the first of it, bool `[T]`.

    Without cu_seqlens there is one sequence.
    """
    places = jnp.arange(length, dtype=jnp.int32)
    if cu_seqlens is None:
        return jnp.zeros_like(places), places == 0
    bounds = as_int32(cu_seqlens)
    sequence = jnp.searchsorted(bounds[1:], places, side="right")
    return sequence, places == bounds[sequence]


def of_every_token(states: Any, sequence: Any, cu_seqlens: Any) -> Any:
    """States `[B or n, ...]` for the tokens of their sequences (`first_tokens`), `[B, 1 or T, ...]`; 0 after the last one."""
    if cu_seqlens is None:
        return states[:, None]
    return jnp.pad(states, ((0, 1), *[(0, 0)] * (states.ndim - 1)))[sequence][None]


def edge_tokens(tokens: Any, otherwise: Any, cu_seqlens: Any, *, first: bool = False) -> Any:
    """The last token, or the first, of every sequence in `[B,T,...]`; for one without tokens `otherwise` `[B or n, ...]`,
    None = 0."""
    if otherwise is None:
        otherwise = empty_states(tokens, cu_seqlens)
    if tokens.shape[1] == 0:
        return otherwise
    if cu_seqlens is None:
        return tokens[:, 0 if first else -1]
    bounds = as_int32(cu_seqlens)
    places = jnp.minimum(bounds[:-1], tokens.shape[1] - 1) if first else jnp.maximum(bounds[1:] - 1, 0)
    filled = (bounds[1:] > bounds[:-1]).reshape(-1, *[1] * (tokens.ndim - 2))
    return jnp.where(filled, tokens[0][places], otherwise)


def empty_states(tokens: Any, cu_seqlens: Any) -> Any:
    """Zeros `[B or n, ...]`, one for each sequence of tokens `[B,T,...]`, split over devices as these are."""
    zeros = jnp.zeros_like(tokens).sum(axis=1)
    if cu_seqlens is None:
        return zeros
    return jnp.zeros((cu_seqlens.shape[0] - 1, *[1] * (zeros.ndim - 1)), zeros.dtype) + zeros


def segment_starts(ids: Any) -> tuple[Any, Any]:
    """Which tokens take part, and which of them begin a segment after another one, bool like the ids `[..., T]`.

    Ids below 0 are padding and do not separate their neighbours. The first token that takes part begins nothing.
    """
    part = ids >= 0
    places = jnp.arange(ids.shape[-1], dtype=jnp.int32)
    last = jax.lax.cummax(jnp.where(part, places, jnp.int32(-1)), axis=ids.ndim - 1)
    last = jnp.concatenate([jnp.full_like(last[..., :1], -1), last[..., :-1]], axis=-1)
    previous = jnp.take_along_axis(ids, jnp.maximum(last, 0), axis=-1)
    return part, part & (last >= 0) & (ids != previous)


def zero_outside(part: Any, *arrays: Any) -> tuple[Any, ...]:
    """Arrays `[b, t, ...]` with zeros at tokens of `[1 or b, t]` that take no part, whatever they hold."""
    return tuple(
        jnp.where(part.reshape(*part.shape, *[1] * (array.ndim - 2)), array, jnp.zeros_like(array)) for array in arrays
    )
