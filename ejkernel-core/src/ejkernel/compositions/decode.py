"""One new token of each sequence over caches that are no pages: a buffer of slots, and a row for each sequence."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel._dispatch.explanation import capturing
from ejkernel.call.partition import mesh_of
from ejkernel.call.records import Bound
from ejkernel.compositions.mesh import over_mesh
from ejkernel.errors import argument_names, invalid, wrong_type
from ejkernel.operations.common.options import as_count
from ejkernel.operations.common.pages import check_lengths
from ejkernel.operations.paged_attention import forms as _paged
from ejkernel.operations.paged_attention.first_keys import traced_limits
from ejkernel.utils.checks import check_array, check_shape
from ejkernel.utils.integers import as_int32
from ejkernel.utils.tracing import refuse_traced


def decode_slots(arrays: dict[str, Any], options: dict[str, Any], **run: Any) -> Any:
    """`decode_attention` with its arguments as `split` gives them."""
    tables, page_size = arrays["block_tables"], as_count("page_size", options["page_size"], 1)
    if getattr(tables, "ndim", 0) == 2:
        room, meaning = tables.shape[1] * page_size, f"what {tables.shape[1]} entries of {page_size} tokens hold"
        check_lengths("seq_lens", arrays["kv_lens"], room, meaning)
    options |= {"page_size": page_size, "sliding_window": _paged.window_of(options["sliding_window"])}
    options |= {"return_lse": True, "form": _flat_buffer}
    names = {"kv_lens": "seq_lens", "block_tables": "req_to_tokens"}
    derived = functools.partial(_paged.scale_specs, "pthd")
    with argument_names(key_pages="key_buffer", value_pages="value_buffer", **names):
        return over_mesh(_paged.attend, arrays, options, positional=tuple(arrays)[:5], derived=derived, **run)


def decode_rows(arrays: dict[str, Any], options: dict[str, Any], **run: Any) -> Any:
    """`ragged_decode_attention` with its arguments as `split` gives them."""
    window, key = options["sliding_window"], arrays["key"]
    if window is not None and not isinstance(window, (tuple, list)):
        refuse_traced("sliding_window", window, "a pair (left, right)")
        width = as_count("sliding_window", window, 1)
        remedy = f"({width - 1}, 0) for the last {width} keys"
        raise wrong_type("sliding_window", width, "a pair (left, right)", remedy=remedy)
    if getattr(key, "ndim", 0) == 4:
        for name in ("sequence_start", "sequence_end"):
            check_lengths(name, arrays[name], key.shape[1], "the keys of each row")
    options |= {"sliding_window": _paged.window_of(window), "form": _dense_cache}
    derived = functools.partial(_paged.scale_specs, "pthd")
    with argument_names(key_pages="key", value_pages="value"):
        return over_mesh(_attend_sequences, arrays, options, positional=tuple(arrays)[:6], derived=derived, **run)


def _attend_sequences(**given: Any) -> Any:
    """`paged_attention` of all sequences at once, or of each alone on a mesh: pages in common are not split."""
    own = {name: given[name] for name in ("query", "key", "value", "sequence_start", "sequence_end")}
    _check_sequences(**own)
    if capturing() or not own["query"].shape[0] or mesh_of(own) is None:
        return _paged.attend(**given)
    own |= {name: given[name] for name in ("k_scale", "v_scale") if getattr(given[name], "ndim", 0) == 3}
    return jax.vmap(lambda one: _paged.attend(**{**given, **{name: x[None] for name, x in one.items()}})[0])(own)


def _flat_buffer(
    *, key_pages: Any, value_pages: Any, page_size: int = 1, k_scale: Any = None, v_scale: Any = None, **rest: Any
) -> Bound:
    """Canonicalise a buffer of slots as pages."""

    def paged(name: str, buffer: Any) -> Any:
        check_array(name, buffer, ndim=3, floating=False)
        if buffer.shape[0] % page_size:
            raise invalid("page_size", page_size, f"a divisor of the {buffer.shape[0]} tokens of {name}")
        return buffer.reshape(buffer.shape[0] // page_size, page_size, *buffer.shape[1:])

    return _paged.one_token_each(
        key_pages=paged("key_buffer", key_pages),
        value_pages=paged("value_buffer", value_pages),
        k_scale=_of_rows("k_scale", k_scale, key_pages.shape[:1], "[tokens, K]", page_size),
        v_scale=_of_rows("v_scale", v_scale, key_pages.shape[:1], "[tokens, K]", page_size),
        **rest,
    )


def _of_rows(name: str, scale: Any, rows: tuple[int, ...], meaning: str, page_size: int) -> Any:
    """A scale of each stored row `[*rows, K]` by pages; any other as it is."""
    if len(getattr(scale, "shape", ())) != len(rows) + 1:
        return scale
    check_shape(name, scale, (*rows, scale.shape[-1]), meaning)
    return scale.reshape(math.prod(rows) // page_size, page_size, scale.shape[-1])


def _check_sequences(*, query: Any, key: Any, value: Any, sequence_start: Any, sequence_end: Any) -> None:
    """Of `ragged_decode_attention`: shapes and types of what each sequence has of its own."""
    one_axis_more = getattr(query, "ndim", 0) == 4
    if one_axis_more and query.shape[1] != 1:
        raise invalid("query", f"{query.shape[1]} tokens per sequence", "[B, H, D] or [B, 1, H, D]")
    check_array("query", query, ndim=4 if one_axis_more else 3)
    for name, array in (("key", key), ("value", value)):
        check_array(name, array, ndim=4, floating=False)
        if array.shape[0] != query.shape[0]:
            raise invalid(name, f"batch size {array.shape[0]}", f"the query's {query.shape[0]}")
        if array.shape[1:3] != key.shape[1:3]:
            raise invalid(name, f"shape {tuple(array.shape)}", f"the {key.shape[1]} tokens and {key.shape[2]} heads of the key")
    for name, array in (("sequence_start", sequence_start), ("sequence_end", sequence_end)):
        check_array(name, array, ndim=1, floating=False)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise wrong_type(name, f"dtype {array.dtype}", "integers")
        check_shape(name, array, tuple(query.shape[:1]), "[B]")


def _dense_cache(
    *,
    query: Any,
    key: Any,
    value: Any,
    sequence_start: Any,
    sequence_end: Any,
    sliding_window: Any = None,
    chunk_size: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    **rest: Any,
) -> Bound:
    """Every token of the cache is a page of its own, so that a sequence may start anywhere: also where a traced window does."""
    one_axis_more = query.ndim == 4
    query = query[:, 0] if one_axis_more else query
    batch, length = key.shape[:2]
    start, end = (jnp.clip(as_int32(x), 0, length) for x in (sequence_start, sequence_end))
    window, chunk = traced_limits(sliding_window, chunk_size, causal=True)
    first = start
    if window is not None or chunk is not None:
        if chunk_size is not None:
            chunk = as_count("chunk_size", chunk_size, 1) if chunk is None else chunk
            first = start + jnp.maximum(end - 1 - start, 0) // chunk * chunk
        if window is not None:
            first, sliding_window = jnp.maximum(first, end - window), None
        chunk_size = None

    def rows(cache: Any) -> Any:
        if batch * length == 0:  # of explicit shardings JAX cannot merge such axes
            return jnp.zeros((0, 1, *cache.shape[2:]), cache.dtype)
        return cache.reshape(batch * length, 1, *cache.shape[2:])

    tokens = jnp.arange(length, dtype=jnp.int32)
    bound = _paged.one_token_each(
        query=query,
        key_pages=rows(key),
        value_pages=rows(value),
        kv_lens=jnp.maximum(end - first, 0),
        block_tables=jnp.arange(batch, dtype=jnp.int32)[:, None] * length + first[:, None] + tokens[None],
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        k_scale=_of_rows("k_scale", k_scale, (batch, length), "[B, S, K]", 1),
        v_scale=_of_rows("v_scale", v_scale, (batch, length), "[B, S, K]", 1),
        **rest,
    )
    finish = (lambda outputs: bound.finish(outputs)[:, None]) if one_axis_more else bound.finish
    return Bound(bound.call, bound.inputs, finish)
