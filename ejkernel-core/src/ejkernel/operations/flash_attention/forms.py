"""Packed sequences as one batch row: every token knows its sequence and its position in it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.call.records import Bound
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.options import as_count
from ejkernel.operations.flash_attention.dropout import host_seed
from ejkernel.operations.flash_attention.interface import OPERATION, is_concrete
from ejkernel.operations.flash_attention.visibility import check_alignment
from ejkernel.utils.checks import check_array
from ejkernel.utils.integers import as_int32

LAYOUTS: Mapping[str, tuple[int, int]] = {"thd": (3, 0), "htd": (3, 1), "bthd": (4, 1), "bhtd": (4, 2)}
"""Number of axes and axis of the tokens, by layout; t are the packed tokens and b has size 1."""

_checked: weakref.WeakValueDictionary[tuple[int, int, Any], jax.Array] = weakref.WeakValueDictionary()
"""Cumulative lengths that were found to be right; being immutable, they need no second look at the next layer's call."""


def check_layout(layout: Any) -> None:
    if layout not in LAYOUTS:
        raise invalid("layout", repr(layout), f"one of {', '.join(LAYOUTS)}")


def check_cum_seqlens(name: str, array: Any, tokens: int, longest: Any = None, longest_name: str = "") -> None:
    """Check cumulative lengths as far as they are known: shape and type always, values when they are concrete."""
    if longest is not None:
        longest = as_count(longest_name, longest, 0)
    key = (id(array), tokens, longest)
    if _checked.get(key) is array:
        return
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise wrong_type(name, type(array).__name__, "an integer array [R + 1]")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise wrong_type(name, f"dtype {array.dtype}", "an integer type", remedy="masks are passed by keyword")
    if len(array.shape) != 1 or array.shape[0] < 1:
        raise invalid(name, f"shape {tuple(array.shape)}", "[R + 1] for R sequences")
    if not is_concrete(array):
        return
    values = np.asarray(array)
    first, last = int(values[0]), int(values[-1])
    if first != 0:
        raise invalid(name, f"{first} as its first entry", "0")
    if (values[1:] < values[:-1]).any():
        raise invalid(name, f"{_shown(values)}, which decreases", "cumulative lengths in ascending order")
    if last > tokens:
        raise invalid(name, f"{last} as its last entry", f"at most the {tokens} packed tokens")
    if longest is not None and len(values) > 1 and (found := int((values[1:] - values[:-1]).max())) > longest:
        raise invalid(longest_name, longest, f"at least {found}, the longest sequence in {name}")
    if isinstance(array, jax.Array):
        _checked[key] = array


def _shown(values: np.ndarray) -> str:
    shown = ", ".join(map(str, values[:8]))
    return f"[{shown}{', ...' if values.size > 8 else ''}]"


def add_packed(
    arrays: dict[str, Any],
    options: dict[str, Any],
    query_lengths: Any,
    key_lengths: Any,
    longest_query: Any = None,
    longest_key: Any = None,
    *,
    layout: str,
    names: tuple[str, ...] = ("cum_seqlens_q", "cum_seqlens_k", "max_seqlens_q", "max_seqlens_k"),
) -> None:
    """Add cumulative lengths to a call. The same object on both sides is passed once, so that kernels may use indices."""
    check_layout(layout)
    axes, axis = LAYOUTS[layout]
    if query_lengths is None:
        raise invalid(names[0], None, "cumulative lengths of the queries")
    described = (
        (0, query_lengths, "query", longest_query),
        (1, query_lengths if key_lengths is None else key_lengths, "key", longest_key),
    )
    for side, lengths, name, longest in described:
        check_array(name, arrays[name], floating=False)
        if len(arrays[name].shape) != axes:
            raise invalid(name, f"shape {tuple(arrays[name].shape)}", f"{axes} axes in layout {layout!r}")
        check_cum_seqlens(names[side], lengths, arrays[name].shape[axis], longest, names[2 + side])
        if axes == 4 and arrays[name].shape[0] != 1:
            raise invalid(name, f"batch size {arrays[name].shape[0]}", "1 with packed sequences")
    if key_lengths is not None and key_lengths.shape != query_lengths.shape:
        got = f"cumulative lengths of {key_lengths.shape[0] - 1} sequences"
        raise invalid(names[1], got, f"those of {query_lengths.shape[0] - 1}, as in {names[0]}")
    arrays["cum_seqlens_q"] = query_lengths
    if key_lengths is not None and key_lengths is not query_lengths:
        arrays["cum_seqlens_k"] = key_lengths
    options["layout"] = layout


def packed(
    query: Any,
    key: Any,
    value: Any,
    cum_seqlens_q: Any,
    cum_seqlens_k: Any = None,
    mask_info: Any = None,
    *,
    layout: str,
    causal: bool = False,
    causal_alignment: str | None = None,
    return_lse: bool = False,
    **rest: Any,
) -> Bound:
    """Canonicalise packed attention. `cum_seqlens_k` None means the queries' own, token for token.

    Positions are needed only where the index of a token cannot stand for them: sequences of other lengths on the two sides, and
    chunks or prefixes, which start anew with every sequence.
    """
    query, key, value = (_as_batch(name, a, layout) for name, a in (("query", query), ("key", key), ("value", value)))
    queries, keys = query.shape[1], key.shape[1]
    same = cum_seqlens_k is None
    if same:
        cum_seqlens_k = cum_seqlens_q
        if queries != keys:
            raise invalid(
                "cum_seqlens_k", None, f"cumulative lengths of the {keys} keys, which are not as many as the {queries} queries"
            )
    if cum_seqlens_q.shape != cum_seqlens_k.shape:
        got = f"{cum_seqlens_k.shape[0] - 1} sequences"
        raise invalid("cum_seqlens_k", got, f"the {cum_seqlens_q.shape[0] - 1} of cum_seqlens_q")
    _refuse_second_description(mask_info)
    check_alignment(causal_alignment, causal or getattr(mask_info, "causal", False))
    query_segments, query_positions, query_lengths = _tokens(cum_seqlens_q, queries)
    key_segments, key_positions, key_lengths = _tokens(cum_seqlens_k, keys)
    if causal_alignment == "bottom_right":
        query_positions = query_positions + _per_token(key_lengths - query_lengths, query_segments)
    restarts = [
        rest.get("chunk_size"),
        rest.get("prefix"),
        *(getattr(mask_info, name, None) for name in ("chunk_size", "prefix")),
    ]
    by_index = same and all(given is None for given in restarts)
    bound = OPERATION.canonicalise(
        query,
        key,
        value,
        mask_info=mask_info,
        query_segments=query_segments[None],
        key_segments=key_segments[None],
        query_positions=None if by_index else query_positions[None],
        key_positions=None if by_index else key_positions[None],
        causal=causal,
        return_lse=return_lse,
        **rest,
    )

    def finish(outputs: Any) -> Any:
        found = bound.finish(outputs)
        if not return_lse:
            return _from_batch(found, layout)
        return _from_batch(found[0], layout), _from_batch(found[1][..., None], layout)[..., 0]

    return Bound(bound.call, bound.inputs, finish)


def _as_batch(name: str, array: Any, layout: str) -> Any:
    """As `[1, t, h, d]`."""
    axes, tokens = LAYOUTS[layout]
    check_array(name, array, floating=False)
    if len(array.shape) != axes:
        raise invalid(name, f"shape {tuple(array.shape)}", f"{axes} axes in layout {layout!r}")
    array = array if axes == 4 else array[None]
    if array.shape[0] != 1:
        raise invalid(name, f"batch size {array.shape[0]}", "1 with packed sequences")
    return array if tokens == axes - 3 else jnp.swapaxes(array, 1, 2)


def _from_batch(array: Any, layout: str) -> Any:
    axes, tokens = LAYOUTS[layout]
    array = array if tokens == axes - 3 else jnp.swapaxes(array, 1, 2)
    return array if axes == 4 else array[0]


def _refuse_second_description(mask_info: Any) -> None:
    names = ("query_segments", "key_segments", "query_positions", "key_positions", "query_lengths", "key_lengths")
    given = [name for name in names if getattr(mask_info, name, None) is not None]
    given += ["causal_offset"] if getattr(mask_info, "causal_offset", 0) else []
    if given:
        raise invalid(
            "mask_info", f"{', '.join(given)} beside cum_seqlens", "sequences described once", remedy="drop one of the two"
        )


def _tokens(cum_seqlens: Any, count: int) -> tuple[Any, Any, Any]:
    """Sequence of every token (-1 past the last one), its position in it, and the lengths `[R]`."""
    cum_seqlens = as_int32(cum_seqlens)
    index = jnp.arange(count, dtype=jnp.int32)
    sequences = jnp.searchsorted(cum_seqlens, index, side="right").astype(jnp.int32) - 1
    segments = jnp.where(index < cum_seqlens[-1], sequences, -1)
    return segments, index - _per_token(cum_seqlens[:-1], segments), cum_seqlens[1:] - cum_seqlens[:-1]


def _per_token(per_sequence: Any, segments: Any) -> Any:
    if per_sequence.shape[0] == 0:
        return jnp.zeros_like(segments)
    return jnp.where(segments < 0, 0, per_sequence[jnp.maximum(segments, 0)])


def made_bias(bias: Any, init_bias: Any) -> Any:
    """The bias, made by the function where there is none."""
    if not callable(init_bias):
        raise wrong_type("init_bias", repr(init_bias), "a function that makes the bias")
    return init_bias() if bias is None else bias


def given_arrays(
    query: Any, key: Any, value: Any, bias: Any, softmax_aux: Any, mask_info: Any, seed: Any, **others: Any
) -> dict[str, Any]:
    """The array arguments that are there; a Python seed as an array."""
    for name, array in (("query", query), ("key", key), ("value", value), ("bias", bias), ("softmax_aux", softmax_aux)):
        if array is not None and not hasattr(array, "dtype"):
            raise wrong_type(name, type(array).__name__, "an array")
    given = {"bias": bias, "softmax_aux": softmax_aux, "mask_info": mask_info, "dropout_seed": host_seed(seed), **others}
    return {"query": query, "key": key, "value": value, **{name: a for name, a in given.items() if a is not None}}
