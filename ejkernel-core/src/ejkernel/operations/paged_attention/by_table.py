"""Rows of queries over pages that a table names, in the words of dense attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.call.records import Bound
from ejkernel.errors import invalid
from ejkernel.operations.paged_attention.interface import OPERATION
from ejkernel.utils.checks import check_array
from ejkernel.utils.integers import as_int32


def rows_over_pages(
    *,
    query: Any,
    block_tables: Any,
    cum_seqlens_q: Any = None,
    cum_seqlens_k: Any = None,
    query_lengths: Any = None,
    key_lengths: Any = None,
    causal: bool = False,
    **rest: Any,
) -> Bound:
    """Canonicalise rows `[B, T, H, D]`, or packed ones `[1, N, H, D]` or `[N, H, D]` with cum_seqlens_q, of which each ends at
    the last of its keys. Keys are counted by cum_seqlens_k `[B + 1]`, by key_lengths `[B | 1]`, or by the smaller of both."""
    packed = cum_seqlens_q is not None
    check_array("query", query, ndim=3 if packed and query.ndim == 3 else 4)
    check_array("block_tables", block_tables, ndim=2, floating=False)
    rows = block_tables.shape[0]
    if packed and query.ndim == 4 and query.shape[0] != 1:
        raise invalid("query", f"batch size {query.shape[0]}", "1 with packed sequences")
    if not packed and query.shape[0] != rows:
        raise invalid("block_tables", f"{rows} rows", f"one for each of the {query.shape[0]} rows of the query")
    if packed and query_lengths is not None:
        raise invalid("mask_info", "lengths of queries", "none beside cum_seqlens_q")
    lengths = _key_lengths(rows, cum_seqlens_k, key_lengths)
    length = query.shape[-3]
    starts = cum_seqlens_q if packed else jnp.arange(rows + 1, dtype=jnp.int32) * length
    if query_lengths is not None and causal:  # the padding stands after the last key, and every query where it should
        lengths = jnp.where(lengths > 0, lengths + length - query_lengths, 0)
    tokens = query.reshape(-1, *query.shape[-2:])
    bound = OPERATION.canonicalise(
        tokens, query_start_loc=starts, kv_lens=lengths, block_tables=block_tables, causal=causal, **rest
    )

    def finish(outputs: Any) -> Any:
        results = jax.tree.map(lambda array: array.reshape(*query.shape[:-2], *array.shape[1:]), bound.finish(outputs))
        if query_lengths is None:
            return results
        out, lse = results if isinstance(results, tuple) else (results, None)
        real = jnp.arange(length)[None] < query_lengths.reshape(-1, 1)
        out = jnp.where(real[..., None, None], out, jnp.zeros((), out.dtype))
        return out if lse is None else (out, jnp.where(real[..., None], lse, -jnp.inf))

    return Bound(bound.call, bound.inputs, finish)


def _key_lengths(rows: int, cum_seqlens_k: Any, key_lengths: Any) -> Any:
    """Keys of each row, int32 `[B]`."""
    found = []
    if cum_seqlens_k is not None:
        check_array("cum_seqlens_k", cum_seqlens_k, ndim=1, floating=False)
        if cum_seqlens_k.shape[0] != rows + 1:
            got = f"shape {tuple(cum_seqlens_k.shape)}"
            raise invalid("cum_seqlens_k", got, f"[B + 1] = [{rows + 1}] for the {rows} rows of block_tables")
        found.append(jnp.diff(cum_seqlens_k))
    if key_lengths is not None:
        if key_lengths.shape[0] not in (1, rows):
            raise invalid("mask_info", f"lengths of {key_lengths.shape[0]} rows of keys", f"{rows}, as in block_tables")
        found.append(jnp.broadcast_to(key_lengths, (rows,)))
    lengths = found[0] if len(found) == 1 else jnp.minimum(*found)
    return as_int32(lengths)
