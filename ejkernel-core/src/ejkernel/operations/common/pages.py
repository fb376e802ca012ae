"""What the operations on paged caches share: layouts of pages, and the description of the requests that own them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ejkernel.errors import invalid, wrong_type
from ejkernel.utils.checks import check_array, check_shape
from ejkernel.utils.integers import as_int32

INTERLEAVED = "interleaved"
LAYOUTS: Mapping[str, str] = {
    "pthd": "[pages, page_size, K, D]",
    "phtd": "[pages, K, page_size, D]",
    "hptd": "[K, pages, page_size, D]",
    INTERLEAVED: "[pages, page_size, 2 K, D], heads in the order k0, v0, k1, v1, ...",
    "packed": "[pages, page_size, 2 K / p, p, D], the same in groups of p heads",
    "side_by_side": "[pages, page_size, K / p, p, 2 D], the value of a head after its key",
}
"""Layouts of a cache by name: p pages, t tokens of a page, h heads, d channels."""

_DIMS = {
    "pthd": "p s {h} {d}",
    "phtd": "p {h} s {d}",
    "hptd": "{h} p s {d}",
    INTERLEAVED: "p s c padded",
    "packed": "p s g c padded",
    "side_by_side": "p s g c padded",
}
FUSED = (INTERLEAVED, "packed", "side_by_side")
"""Layouts that hold keys and values in one array."""

_ONE_BYTE = ("int8", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class PageShape:
    """Sizes of one array of pages. `heads` counts pairs of key and value heads where the layout holds both."""

    pages: int
    page_size: int
    heads: int
    head_size: int

    @classmethod
    def of(cls, shape: tuple[int, ...], layout: str) -> PageShape:
        """Read a canonical shape, which has the batch in front."""
        names = _DIMS[layout].format(h="h", d="d").split()
        sizes = dict(zip(names, shape[1:], strict=True))
        if layout not in FUSED:
            return cls(sizes["p"], sizes["s"], sizes["h"], sizes["d"])
        heads, beside = sizes.get("g", 1) * sizes["c"], layout == "side_by_side"
        return cls(sizes["p"], sizes["s"], heads if beside else heads // 2, sizes["padded"] // 2 if beside else sizes["padded"])


class PageStrides(NamedTuple):
    """Elements from one page, token of a page, head and batch member to the next, and from a head's key to its value in the same
    array."""

    page: int
    token: int
    head: int
    batch: int
    first_value: int = 0

    @classmethod
    def of(cls, shape: tuple[int, ...], layout: str) -> PageStrides:
        """Read a canonical shape, which has the batch in front."""
        sizes, batch = PageShape.of(shape, layout), math.prod(shape[1:])
        tokens, heads, size = sizes.page_size, sizes.heads, sizes.head_size
        if layout in FUSED:
            return cls(tokens * heads * 2 * size, heads * 2 * size, 2 * size, batch, first_value=size)
        if layout == "pthd":
            return cls(tokens * heads * size, heads * size, size, batch)
        if layout == "phtd":
            return cls(tokens * heads * size, size, tokens * size, batch)
        return cls(tokens * size, size, sizes.pages * tokens * size, batch)


def alternating(pages: Any, layout: str) -> Any:
    """Fused pages, or any selection `[..., heads]` of their tokens, as `[..., 2 K, D]` in the order k0, v0, k1, v1, ..."""
    if layout == INTERLEAVED:
        return pages
    *leading, groups, packing, channels = pages.shape
    halves = 2 if layout == "side_by_side" else 1
    return pages.reshape(*leading, groups * packing * halves, channels // halves)


def page_dims(shape: Sequence[int], layout: str, batch: str, head: str, channel: str) -> str:
    """The dims of canonical pages of this shape, for `Operation.dimensions`. Devices never part a key from its value."""
    if layout not in FUSED:
        return f"{batch} {_DIMS[layout].format(h=head, d=channel)}"
    if layout == INTERLEAVED:
        return f"{batch} p s {head}*2 padded"
    whole = layout == "side_by_side" or shape[-2] % 2 == 0
    return f"{batch} p s {head}{'' if whole else '*2'} c padded"


def head_factor(heads: int, shape: Sequence[int], layout: str, owner: str) -> str:
    """The factor of head axes: `h`, which may be split over devices, unless pages of this shape have padding after their heads."""
    return "h" if PageShape.of(tuple(shape), layout).heads == heads else f"{owner}_heads"


def check_layout(layout: Any) -> None:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise invalid("layout", repr(layout), f"one of {', '.join(LAYOUTS)}")


def canonical_pages(name: str, pages: Any, layout: str) -> Any:
    """Pages with the batch axis."""
    check_array(name, pages, ndim=4 if _DIMS[layout].count(" ") == 3 else 5, floating=False)
    if np.dtype(pages.dtype).name not in _ONE_BYTE and not (
        jnp.issubdtype(pages.dtype, jnp.floating) and pages.dtype.itemsize > 1
    ):
        raise wrong_type(name, f"dtype {pages.dtype}", f"a floating type of two bytes or more, or {', '.join(_ONE_BYTE)}")
    if PageShape.of((1, *pages.shape), layout).page_size == 0:
        raise invalid(name, f"shape {tuple(pages.shape)}", f"pages of at least one token: {LAYOUTS[layout]}")
    odd = pages.shape[-1] % 2 if layout == "side_by_side" else layout in FUSED and np.prod(pages.shape[2:-1]) % 2
    if odd:
        raise invalid(name, f"shape {tuple(pages.shape)}", f"{LAYOUTS[layout]} in layout {layout!r}")
    return pages[None]


def check_page_pair(key_pages: Any, value_pages: Any, layout: str) -> None:
    """Check canonical key and value pages against each other; fused ones hold both."""
    if layout in FUSED:
        if value_pages is not None:
            raise invalid("value_pages", "an array", "None", remedy=f"layout {layout!r} holds keys and values in key_pages")
        return
    if value_pages is None:
        raise wrong_type("value_pages", None, "an array", remedy=f"only layouts {', '.join(FUSED)} hold values in key_pages")
    key, value = PageShape.of(key_pages.shape, layout), PageShape.of(value_pages.shape, layout)
    if dataclasses.replace(key, head_size=0) != dataclasses.replace(value, head_size=0):
        got = f"shape {tuple(value_pages.shape[1:])}"
        raise invalid("value_pages", got, f"{LAYOUTS[layout]} with the sizes of the key pages {tuple(key_pages.shape[1:])}")
    if key_pages.dtype != value_pages.dtype:
        raise wrong_type("value_pages", f"dtype {value_pages.dtype}", f"the key pages' {key_pages.dtype}")


def check_key_heads(key_heads: Any, found: int, layout: str) -> int | None:
    """The heads in use where fused pages have padding after them; None where all are used."""
    if key_heads is None or key_heads == found:
        return None
    if layout not in FUSED or not isinstance(key_heads, int) or not 0 < key_heads < found:
        raise invalid(
            "key_heads", repr(key_heads), f"the {found} heads of the pages" if layout not in FUSED else f"1 ... {found}"
        )
    return key_heads


def canonical_requests(query_start_loc: Any, kv_lens: Any, block_tables: Any) -> tuple[Any, Any, Any]:
    """Check the description of the requests and add the batch axis: int32 `[1, R + 1]`, `[1, R]`, `[1, R, P]`."""
    for name, array, ndim in (
        ("query_start_loc", query_start_loc, 1),
        ("kv_lens", kv_lens, 1),
        ("block_tables", block_tables, 2),
    ):
        check_array(name, array, ndim=ndim, floating=False)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise wrong_type(name, f"dtype {array.dtype}", "integers")
    requests = kv_lens.shape[0]
    if query_start_loc.shape[0] != requests + 1:
        got = f"shape {tuple(query_start_loc.shape)}"
        raise invalid("query_start_loc", got, f"[R + 1] = [{requests + 1}] for the {requests} requests of kv_lens")
    if block_tables.shape[0] != requests:
        raise invalid("block_tables", f"{block_tables.shape[0]} rows", f"one for each of the {requests} requests of kv_lens")
    return tuple(as_int32(array)[None] for array in (query_start_loc, kv_lens, block_tables))  # pyright: ignore[reportReturnType]


def canonical_page_scale(name: str, scale: Any, key_heads: int) -> Any:
    """A factor of stored values, a scalar or `[K]`, as float32 `[1, 1 or K]`."""
    if scale is None:
        return None
    if not isinstance(scale, (int, float)):
        check_array(name, scale)
    array = jnp.asarray(scale, jnp.float32)
    if array.shape not in ((), (1,), (key_heads,)):
        stored = "paged_cache_update(k_scale_cache=, v_scale_cache=) stores a scale with each row" if array.ndim == 3 else ""
        got = f"shape {tuple(array.shape)}"
        raise invalid(name, got, f"a scalar or [K] with K = {key_heads} key heads", remedy=stored)
    return array.reshape(1, -1)


def canonical_scales(name: str, scale: Any, key_heads: int, pages: PageShape) -> tuple[Any, Any]:
    """A factor of stored values, as `[1, 1 or K]`, or as `[1, pages, page_size, 1 or K]` if each stored row has one of its own."""
    if len(getattr(scale, "shape", ())) != 3:
        return canonical_page_scale(name, scale, key_heads), None
    check_array(name, scale)
    allowed = [(pages.pages, pages.page_size, heads) for heads in (key_heads, 1)]
    if tuple(scale.shape) not in allowed:
        raise invalid(name, f"shape {tuple(scale.shape)}", f"[pages, page_size, K] = {allowed[0]}, a scalar or [K]")
    return None, jnp.asarray(scale, jnp.float32)[None]


def check_starts(name: str, starts: Any, tokens: int, active: Any = None) -> None:
    """Refuse cumulative numbers of new tokens that are known and do not ascend from 0 to at most the tokens that there are.

    Args:
        name, starts: the argument and its values `[R + 1]`.
        tokens: N.
        active: the number of requests in use, or what ends with it, None for all; later entries may hold anything.
    """
    known, count = known_values(starts), known_values(active)
    if known is None or known.ndim != 1 or not known.size or (active is not None and count is None):
        return
    known = known if count is None else known[: int(count.reshape(-1)[-1]) + 1]
    if known[0] != 0 or (known[1:] < known[:-1]).any() or known[-1] > tokens:
        raise invalid(name, known.tolist()[:8], f"0, then ascending values of at most {tokens} = tokens")


def check_count(name: str, count: Any, requests: int) -> None:
    """Refuse a number of requests in use, alone or the last of several, that is known and not one of 0 ... R."""
    known = known_values(count)
    if known is not None and known.size and not 0 <= known.reshape(-1)[-1] <= requests:
        raise invalid(name, known.reshape(-1)[-1], f"at most {requests} requests in use, the length of kv_lens")


def check_lengths(name: str, lengths: Any, room: int, meaning: str, active: Any = None) -> None:
    """Refuse lengths that are known and negative or more than there is room for."""
    known, count = known_values(lengths), known_values(active)
    if known is None or known.ndim != 1 or (active is not None and count is None):
        return
    known = known if count is None else known[: int(count.reshape(-1)[-1])]
    if known.size and not (known.min() >= 0 and known.max() <= room):
        raise invalid(name, f"values in [{known.min()}, {known.max()}]", f"values in [0, {room}], {meaning}")


def check_row_lengths(kv_lens: Any, query: Any, cache: Any, cache_name: str) -> None:
    """Refuse what is not integers `[B]`, or known to be more tokens than a cache `[B,S,...]` has."""
    check_array("kv_lens", kv_lens, ndim=1, floating=False)
    if not jnp.issubdtype(kv_lens.dtype, jnp.integer):
        raise wrong_type("kv_lens", f"dtype {kv_lens.dtype}", "integers")
    check_shape("kv_lens", kv_lens, (query.shape[0],), "[B]")
    check_lengths("kv_lens", kv_lens, cache.shape[1], f"the tokens of each row of {cache_name}")


def known_values(array: Any) -> np.ndarray | None:
    """The values, if they can be read here and now without leaving this process."""
    if isinstance(array, int):
        return np.asarray(array)
    if isinstance(array, jax.Array):
        return None if isinstance(array, Tracer) or not array.is_fully_addressable else np.asarray(array)
    return array if isinstance(array, np.ndarray) else None
