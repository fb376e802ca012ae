"""What the functions on paged caches share: other ways to say a call, and known lengths checked against tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ejkernel._dispatch.explanation import capturing
from ejkernel.call.records import Bound
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common import pages as _pages
from ejkernel.operations.paged_attention.interface import OPERATION as PAGED_ATTENTION, as_window
from ejkernel.operations.paged_cache_update.interface import OPERATION as PAGED_CACHE_UPDATE
from ejkernel.utils.checks import check_array, check_shape
from ejkernel.utils.integers import as_int32

_PAGE_AXIS: Mapping[str, int] = {"phtd": 2, "hptd": 2}
_SCALE_AXES: Mapping[str, tuple[int, ...]] = {"phtd": (0, 2, 1), "hptd": (1, 2, 0)}
"""By layout, the axes of a cache in the order of its scales `[pages, page_size, K]`; first to last where it is not named."""


def attend(*, form: Callable[..., Bound] | None = None, platform: Any = None, cfg: Any = None, **given: Any) -> Any:
    """`paged_attention` on arrays and options together; a function that `over_mesh` can call."""
    arrays = {name: value for name, value in given.items() if name not in _OPTIONS}
    options = {name: given[name] for name in _OPTIONS if given.get(name) is not None}
    return PAGED_ATTENTION.invoke(arrays, options, platform=platform, cfg=cfg, form=form)


_OPTIONS = (
    "layout",
    "key_heads",
    "page_size",
    "softmax_scale",
    "causal",
    "sliding_window",
    "chunk_size",
    "logits_soft_cap",
    "precision",
    "return_lse",
)


def scale_specs(layout: str, arrays: Mapping[str, Any], specs: Mapping[str, PartitionSpec]) -> dict[str, PartitionSpec]:
    """Scales of stored heads, or of stored rows, are split over a mesh as their cache is."""
    found: dict[str, PartitionSpec] = {}
    for name, pages, dense in (("k_scale", "key_pages", "key"), ("v_scale", "value_pages", "value")):
        # Beside pages, keys and values are new tokens; without, they are the cache.
        cache = next(each for each in (pages, "key_pages", "kv_cache", dense) if arrays.get(each) is not None)
        shape, axes = getattr(arrays.get(name), "shape", ()), arrays[cache].ndim
        if shape in ((), (1,)):
            continue
        entries = (*specs.get(cache, PartitionSpec()), *[None] * axes)
        order = _SCALE_AXES.get(layout, tuple(range(3 if layout in _pages.FUSED else axes - 1)))
        found[name] = PartitionSpec(*(entries[axis] for axis in order[-len(shape) :]))
    return found


def update_and_attend(
    *,
    query: Any,
    key: Any,
    value: Any,
    key_pages: Any,
    value_pages: Any = None,
    query_start_loc: Any,
    kv_lens: Any,
    block_tables: Any,
    distribution: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    layout: str = "pthd",
    platform: Any = None,
    cfg: Any = None,
    **rest: Any,
) -> tuple[Any, Any]:
    """`paged_cache_update`, then `paged_attention` over what it wrote; returns the output and the pages."""
    check_array("query", query, ndim=3)
    check_array("key", key, ndim=3, floating=False)
    if key.shape[0] != query.shape[0]:
        raise invalid("key", f"{key.shape[0]} tokens", f"the {query.shape[0]} tokens of the query")
    described = {"query_start_loc": query_start_loc, "kv_lens": kv_lens, "block_tables": block_tables}
    scales = {name: scale for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)) if scale is not None}
    active = {} if distribution is None else {"distribution": distribution}
    pages = {"key_pages": key_pages} if value_pages is None else {"key_pages": key_pages, "value_pages": value_pages}
    updated: Any = None
    if not capturing():  # an explanation is asked of the attention
        updated = PAGED_CACHE_UPDATE.invoke(
            {"key": key, "value": value, **pages, **described, **scales, **active},
            {"layout": layout},
            platform=platform,
            form=None if distribution is None else _update_distributed,
        )
        pages = dict(zip(pages, updated if isinstance(updated, tuple) else (updated,), strict=True))
    out = attend(
        query=query,
        **pages,
        **described,
        **scales,
        **active,
        layout=layout,
        form=None if distribution is None else _attend_distributed,
        platform=platform,
        cfg=cfg,
        **rest,
    )
    return out, updated


def one_token_each(*, query: Any, **rest: Any) -> Bound:
    """Canonicalise one new token per request, `[R, H, D]`. Their places are a constant: JAX's range is a kernel in every call."""
    check_array("query", query, ndim=3)
    requests = query.shape[0]
    if not isinstance(requests, int):
        got = f"a symbolic number of requests, {requests}"
        raise invalid("query", got, "a number", remedy="export one program for each number of requests that is served")
    return PAGED_ATTENTION.canonicalise(query, query_start_loc=np.arange(requests + 1, dtype=np.int32), **rest)


def attend_active(*, query_start_loc: Any, kv_lens: Any, num_seqs: Any, **rest: Any) -> Bound:
    """Canonicalise with the first `num_seqs` requests alone."""
    starts, lengths = first_requests(query_start_loc, kv_lens, num_seqs)
    return PAGED_ATTENTION.canonicalise(query_start_loc=starts, kv_lens=lengths, **rest)


def _attend_distributed(*, query_start_loc: Any, kv_lens: Any, block_tables: Any, distribution: Any, **rest: Any) -> Bound:
    return PAGED_ATTENTION.canonicalise(**distributed(query_start_loc, kv_lens, block_tables, distribution), **rest)


def _update_distributed(*, query_start_loc: Any, kv_lens: Any, block_tables: Any, distribution: Any, **rest: Any) -> Bound:
    return PAGED_CACHE_UPDATE.canonicalise(**distributed(query_start_loc, kv_lens, block_tables, distribution), **rest)


def distributed(query_start_loc: Any, kv_lens: Any, block_tables: Any, distribution: Any) -> dict[str, Any]:
    """The requests before the distribution's last entry, with the flat tables as `[R, W]`."""
    starts, lengths = first_requests(query_start_loc, kv_lens, distribution[2])
    tables = block_tables.reshape(kv_lens.shape[0], -1) if kv_lens.shape[0] else block_tables.reshape(0, 0)
    return {"query_start_loc": starts, "kv_lens": lengths, "block_tables": tables}


def check_distributed(
    query_start_loc: Any, kv_lens: Any, block_tables: Any, distribution: Any, *, tokens: int, page_size: int
) -> None:
    """Check the description of requests by flat tables and a distribution, and of its values what is known."""
    described = {"query_start_loc": query_start_loc, "kv_lens": kv_lens, "block_tables": block_tables}
    for name, array in {**described, "distribution": distribution}.items():
        check_array(name, array, ndim=1, floating=False)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise wrong_type(name, f"dtype {array.dtype}", "integers")
    check_shape("distribution", distribution, (3,), "[3]")
    requests = kv_lens.shape[0]
    entries, rest = divmod(block_tables.shape[0], requests) if requests else (0, block_tables.shape[0])
    if rest:
        got = f"{block_tables.shape[0]} entries"
        raise invalid("block_tables", got, f"the same number for each of the {requests} requests of kv_lens")
    _pages.check_count("distribution", distribution, requests)
    meaning = f"what {entries} pages of {page_size} tokens hold"
    _pages.check_lengths("kv_lens", kv_lens, entries * page_size, meaning, distribution)
    _pages.check_starts("query_start_loc", query_start_loc, tokens, distribution)


def first_requests(starts: Any, lengths: Any, count: Any) -> tuple[Any, Any]:
    """Starts and lengths in which requests from `count` on have neither new tokens nor keys, whatever they held."""
    for name, array in (("query_start_loc", starts), ("kv_lens", lengths)):
        check_array(name, array, ndim=1, floating=False)
    requests = lengths.shape[0]
    if not isinstance(count, int):
        check_array("num_seqs", count, floating=False)
    if not jnp.issubdtype(jnp.result_type(count), jnp.integer) or jnp.size(count) != 1:
        raise wrong_type("num_seqs", f"{jnp.result_type(count)} of shape {jnp.shape(count)}", "an integer, a scalar or [1]")
    count = jnp.clip(as_int32(count).reshape(()), 0, requests)
    active = jnp.arange(requests + 1, dtype=jnp.int32)
    starts = starts[jnp.minimum(active, count)] if starts.shape[0] == requests + 1 else starts
    return starts, jnp.where(active[:-1] < count, lengths, 0)


def window_of(sliding_window: Any) -> Any:
    """The last keys that are visible: an int counts them, a pair `(left, right)` means `left + 1`."""
    return as_window(sliding_window)


def check_known(lengths_name: str, lengths: Any, tables: Any, pages: Any, layout: str, active: Any = None) -> None:
    """Lengths that are known must fit what the tables' pages hold."""
    _pages.check_layout(layout)
    if getattr(lengths, "ndim", 0) == 1:
        _pages.check_count("num_seqs", active, lengths.shape[0])
    if getattr(tables, "ndim", 0) == 2 and getattr(pages, "ndim", 0) >= 4:
        size = pages.shape[_PAGE_AXIS.get(layout, 1)]
        meaning = f"what {tables.shape[1]} pages of {size} tokens hold"
        _pages.check_lengths(lengths_name, lengths, tables.shape[1] * size, meaning, active)


def settings(**given: Any) -> dict[str, Any]:
    """Options without those that are None."""
    return {name: value for name, value in given.items() if value is not None}


def check_hints(**hints: Any) -> None:
    """Hints to platforms that have such a knob must at least be of the right kind; they never change results.

    Args:
        **hints: by argument name, `(value, type or types)`; None is always right.
    """
    for name, (value, kinds) in hints.items():
        if value is not None and not isinstance(value, kinds):
            kind = " or ".join(one.__name__ for one in (kinds if isinstance(kinds, tuple) else (kinds,)))
            raise wrong_type(name, repr(value), f"{kind}, or None")


def check_floating_dtype(name: str, dtype: Any) -> None:
    """Refuse what is not a floating dtype."""
    try:
        floating = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise invalid(name, repr(dtype), "a floating dtype, or None")


def separate_caches(**given: Any) -> tuple[Any, Any, Any]:
    """As `update_and_attend`, and returns the caches one after the other."""
    out, (key_cache, value_cache) = update_and_attend(**given)
    return out, key_cache, value_cache


def packed_cache(*, queries: Any, keys: Any, values: Any, kv_cache: Any, **rest: Any) -> tuple[Any, Any]:
    """As `update_and_attend` on keys and values in one cache: beside each other in a row of a head, or head by head."""
    check_array("keys", keys, ndim=3, floating=False)
    key_heads, head_size = keys.shape[1:]
    heads, channels = kv_cache.shape[2] * kv_cache.shape[3], kv_cache.shape[4]
    beside = heads < 2 * key_heads
    if beside and (heads < key_heads or channels != 2 * head_size):
        got = f"{heads} heads of {channels} channels"
        raise invalid("kv_cache", got, f"{2 * key_heads} heads or more of at least {head_size} channels")
    return update_and_attend(
        query=queries,
        key=keys,
        value=values,
        key_pages=kv_cache,
        layout="side_by_side" if beside else "packed",
        key_heads=key_heads,
        **rest,
    )


def one_request(*, query: Any, context_len: Any, page_indices: Any, **rest: Any) -> Bound:
    """The call of one request's queries `[T,H,D]`."""
    check_array("query", query, ndim=3)
    check_array("page_indices", page_indices, ndim=1, floating=False)
    if not isinstance(context_len, int):
        check_array("context_len", context_len, floating=False)
    if jnp.size(context_len) != 1 or jnp.ndim(context_len) > 1:
        raise invalid("context_len", f"shape {jnp.shape(context_len)}", "a scalar or [1]")
    starts = jnp.array([0, query.shape[0]], jnp.int32)
    lengths = jnp.asarray(context_len).reshape(1)
    return PAGED_ATTENTION.canonicalise(query, query_start_loc=starts, kv_lens=lengths, block_tables=page_indices[None], **rest)
