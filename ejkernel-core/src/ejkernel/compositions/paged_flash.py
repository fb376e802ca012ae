"""`flash_attention` over pages."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ejkernel._pipeline.arguments import pick
from ejkernel.compositions.mesh import is_sharded, named_specs, over_mesh
from ejkernel.errors import argument_names, invalid
from ejkernel.masks import MaskInfo
from ejkernel.operations.common.options import as_count, as_flag
from ejkernel.operations.common.pages import check_starts, known_values
from ejkernel.operations.flash_attention.bind import as_logits_dtype
from ejkernel.operations.flash_attention.interface import OPERATION as _FLASH_ATTENTION
from ejkernel.operations.paged_attention import forms as _paged
from ejkernel.operations.paged_attention.by_table import rows_over_pages
from ejkernel.utils.tracing import has_traced, is_traced

_SERVED = "softmax_scale logits_soft_cap precision return_lse"
"""Options that paged attention has under the same name."""

_SAID_OTHERWISE = ("causal", "causal_alignment", "sliding_window")
"""Options that it has in other words."""

_UNSAID = ("dense", "query_segments", "key_segments", "query_positions", "key_positions", "window", "chunk_size", "prefix")


def attend_over_pages(
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    positional: tuple[str, ...],
    mesh: Any,
    in_specs: Any,
    out_specs: Any,
    **settings: Any,
) -> Any:
    """`paged_attention` of rows whose keys `block_tables` names.

    Args:
        arrays: those of `flash_attention`, where key and value are pages; None where absent. Its mask_info has lengths of rows, and
            causality; no other part.
        options: those of `flash_attention`, but that queries are the last tokens of their rows.
        positional, mesh, in_specs, out_specs: see `over_mesh`.
        **settings: platform and cfg.
    """
    dtype = arrays["query"].dtype
    given = {**options, "logits_dtype": as_logits_dtype(options["logits_dtype"], dtype), "bias": arrays["bias"]}
    for name, plain in _plain_options().items():
        plain = as_logits_dtype(plain, dtype) if name == "logits_dtype" else plain
        value = given.get(name, plain)
        if (value is not None) if plain is None else (value != plain):
            raise invalid(name, value if isinstance(value, (int, float, str)) else "an array", f"{plain} with block_tables")
    causal_alignment, mask_info = options["causal_alignment"], arrays["mask_info"]
    info = MaskInfo() if mask_info is None else mask_info
    said = [part for part in _UNSAID if getattr(info, part) is not None]
    if said or info.causal_offset:
        got = f"a mask with {said[0] if said else 'causal_offset'}"
        raise invalid("mask_info", got, "lengths and causality alone with block_tables")
    if arrays["cum_seqlens_k"] is None and info.key_lengths is None:
        remedy = "it does not say how many keys each row has: pass cum_seqlens_k, or lengths in mask_info"
        raise invalid("block_tables", "a page table", "None", remedy=f"{remedy}; unified_attention takes pages with lengths")
    if causal_alignment not in (None, "bottom_right"):
        meaning = "'bottom_right' with block_tables: queries are the last tokens of their rows"
        raise invalid("causal_alignment", repr(causal_alignment), meaning)
    _check_known(arrays, info)
    causal = as_flag("causal", options["causal"]) or info.causal
    one_token = arrays["cum_seqlens_q"] is None and arrays["query"].shape[-3] == 1
    causal, window = _window(options["sliding_window"], causal, one_token)
    given = pick(arrays, "query key_pages=key value_pages=value softmax_aux block_tables cum_seqlens_q cum_seqlens_k")
    given |= {"query_lengths": info.query_lengths, "key_lengths": info.key_lengths}
    settings |= pick(options, _SERVED)
    settings |= {"causal": causal, "sliding_window": window, "form": rows_over_pages}
    specs: dict[str, Any] = {"positional": tuple(given), "mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}
    if is_sharded(mesh, in_specs, out_specs):
        given, specs["in_specs"] = _split_rows(given, named_specs(arrays, positional, in_specs))
    with argument_names(key_pages="key", value_pages="value", kv_lens="cum_seqlens_k", query_start_loc="cum_seqlens_q"):
        return over_mesh(_paged.attend, given, settings, **specs)


@functools.cache
def _plain_options() -> Mapping[str, Any]:
    """The bias, and whatever options of `flash_attention` paged attention does not have, with the values that say nothing."""
    parameters = inspect.signature(_FLASH_ATTENTION.canonicalise).parameters.values()
    served = {*_SERVED.split(), *_SAID_OTHERWISE}
    return {p.name: p.default for p in parameters if p.name == "bias" or (p.kind is p.KEYWORD_ONLY and p.name not in served)}


def _check_known(arrays: Mapping[str, Any], info: MaskInfo) -> None:
    """Lengths that are known must fit the tables and the query."""
    counted = known_values(arrays["cum_seqlens_k"])
    described = {"cum_seqlens_k": None if counted is None else np.diff(counted), "mask_info": info.key_lengths}
    for name, lengths in described.items():
        _paged.check_known(name, lengths, arrays["block_tables"], arrays["key"], "pthd")
    if arrays["cum_seqlens_q"] is not None:
        check_starts("cum_seqlens_q", arrays["cum_seqlens_q"], arrays["query"].shape[-3])


def _split_rows(given: dict[str, Any], specs: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Lengths of rows in place of cumulative ones, which cannot be split, and the specs of all arrays."""
    rows = specs.get("query", PartitionSpec())[:1] if given["cum_seqlens_q"] is None else ()
    if given["cum_seqlens_k"] is not None:
        lengths = jnp.diff(given["cum_seqlens_k"])
        known = given["key_lengths"]
        given = {**given, "cum_seqlens_k": None, "key_lengths": lengths if known is None else jnp.minimum(lengths, known)}
    public = {"key_pages": "key", "value_pages": "value"}
    by_rows = {name: PartitionSpec(*rows) for name in ("block_tables", "query_lengths", "key_lengths")}
    one_row = {name for name in ("query_lengths", "key_lengths") if given[name] is not None and given[name].shape[0] == 1}
    ordered = {**by_rows, **dict.fromkeys(one_row), **specs}
    return given, [ordered.get(public.get(name, name)) for name in given]


def _window(sliding_window: Any, causal: bool, one_token: bool) -> tuple[bool, Any]:
    """Causality, and how many of the last keys a query sees: a window of paged attention ends at the query."""
    sides = sliding_window if isinstance(sliding_window, (tuple, list)) else (sliding_window, sliding_window)
    if len(sides) != 2:
        raise invalid("sliding_window", sliding_window, "an int or (left, right)")
    left, right = (side if side is None or is_traced(side) else as_count("sliding_window", side, 0) for side in sides)
    width = _paged.window_of((left, right))
    if causal or one_token:
        return causal, width
    if not is_traced(right) and right == 0:
        return True, width
    if left is None and right is None:
        return causal, None
    got = "a traced value" if has_traced(sliding_window) else sliding_window
    raise invalid("sliding_window", got, "(left, 0) with block_tables, or causal=True")
