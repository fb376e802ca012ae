"""Contract of `paged_cache_update`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Num

from ejkernel._pipeline.operation import Operation
from ejkernel.call.arrays import ArraySpec, has_gradient, named
from ejkernel.call.random import requests
from ejkernel.call.records import Bound, Call, Cost
from ejkernel.errors import invalid
from ejkernel.operations.common import pages as _pages
from ejkernel.operations.common.pages import FUSED, PageShape
from ejkernel.plugin import Phase
from ejkernel.typing import RecordArray as Array
from ejkernel.utils.checks import check_array, check_compute


class PagedCacheUpdateInputs(NamedTuple):
    """Canonical arrays; `1|b` where the batch may share one.

    key `[b, N, K, D]`; value `[b, N, K, V]`; key_pages and value_pages in the call's layout; value_pages None where
    key_pages hold both; query_start_loc int32 `[1|b, R + 1]`; kv_lens int32 `[1|b, R]`;
    block_tables int32 `[1|b, R, W]`; key_scale and value_scale float32 `[1|b, 1|K]`.
    """

    key: Num[Array, "b n k d"]
    value: Num[Array, "b n k v"]
    key_pages: Num[Array, "#b ..."]
    value_pages: Num[Array, "#b ..."]
    query_start_loc: Int32[Array, "#b boundaries"]
    kv_lens: Int32[Array, "#b requests"]
    block_tables: Int32[Array, "#b requests w"]
    key_scale: Float32[Array, "#b #k"] = None
    value_scale: Float32[Array, "#b #k"] = None


class PagedCacheUpdateOutputs(NamedTuple):
    """The pages, with the new keys and values in them. There is no residual."""

    key_pages: Num[Array, "#b ..."]
    value_pages: Num[Array, "#b ..."] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedCacheUpdateCall(Call):
    """Static facts.

    Attributes:
        layout: of the pages, a name of `_pages.LAYOUTS`.
    """

    key: ArraySpec
    value: ArraySpec
    key_pages: ArraySpec
    value_pages: ArraySpec | None = None
    query_start_loc: ArraySpec
    kv_lens: ArraySpec
    block_tables: ArraySpec
    key_scale: ArraySpec | None = None
    value_scale: ArraySpec | None = None
    layout: str = "pthd"

    @property
    def pages(self) -> PageShape:
        return PageShape.of(self.key_pages.shape, self.layout)


class PagedCacheUpdate(Operation):
    """Token t of a request with q new tokens and n keys, those included, is stored at position `n - q + t` of its pages.

    Stored is `key / key_scale` in the pages' dtype, rounded to nearest and held within the range of int8 and float8. Positions
    below 0 or beyond the block table, pages outside of the cache and tokens that no request owns are dropped; everything else that
    pages hold stays. No two tokens may share a slot.
    """

    name = "paged_cache_update"
    Call = PagedCacheUpdateCall
    Inputs = PagedCacheUpdateInputs
    Outputs = PagedCacheUpdateOutputs
    revisions = (4,)
    differentiable = ("key", "value", "key_pages", "value_pages", "key_scale", "value_scale")
    shardable = ("b", "h")

    def canonicalise(
        self,
        key: Any,
        value: Any,
        key_pages: Any,
        value_pages: Any = None,
        query_start_loc: Any = None,
        kv_lens: Any = None,
        block_tables: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        *,
        layout: str = "pthd",
    ) -> Bound:
        """Check and add the batch axis.

        Arguments as in `ejkernel.paged_cache_update`; key, value and pages are its keys, values and caches. In layouts that hold
        both, value_pages is None and D = V; pages may have more heads and channels than the keys: those stay as they are.
        """
        for name, new, scale in (("key", key, k_scale), ("value", value, v_scale)):
            check_array(name, new, ndim=3, floating=False)
            if scale is not None or new.dtype != getattr(key_pages, "dtype", None):
                check_compute(name, new)
        if key.shape[:2] != value.shape[:2]:
            raise invalid("value", f"shape {tuple(value.shape)}", f"{key.shape[0]} tokens and {key.shape[1]} heads as the key")
        _pages.check_layout(layout)
        key_pages = _pages.canonical_pages("key_pages", key_pages, layout)
        if value_pages is not None:
            value_pages = _pages.canonical_pages("value_pages", value_pages, layout)
        _pages.check_page_pair(key_pages, value_pages, layout)
        for name, new, pages in (("key", key, key_pages), ("value", value, key_pages if value_pages is None else value_pages)):
            _check_fits(name, new, PageShape.of(pages.shape, layout), layout)
        starts, lengths, tables = _pages.canonical_requests(query_start_loc, kv_lens, block_tables)
        inputs = PagedCacheUpdateInputs(
            key=key[None],
            value=value[None],
            key_pages=key_pages,
            value_pages=value_pages,
            query_start_loc=starts,
            kv_lens=lengths,
            block_tables=tables,
            key_scale=_pages.canonical_page_scale("k_scale", k_scale, key.shape[1]),
            value_scale=_pages.canonical_page_scale("v_scale", v_scale, key.shape[1]),
        )
        call = PagedCacheUpdateCall(**{name: ArraySpec.of(array) for name, array in named(inputs)}, layout=layout)  # pyright: ignore[reportArgumentType]

        def finish(outputs: PagedCacheUpdateOutputs) -> Any:
            if layout in FUSED:
                return outputs.key_pages[0]
            return outputs.key_pages[0], outputs.value_pages[0]

        return Bound(call, inputs, finish)

    def check_values(self, arrays: Mapping[str, Any]) -> None:
        if getattr(arrays.get("key"), "ndim", 0) == 3 and "query_start_loc" in arrays:
            active = arrays.get("num_seqs", arrays.get("distribution"))
            _pages.check_starts("query_start_loc", arrays["query_start_loc"], arrays["key"].shape[0], active)

    def random_inputs(self, call: PagedCacheUpdateCall, rng: np.random.Generator, **given: Any) -> PagedCacheUpdateInputs:
        """A mix of requests that own all tokens and different pages."""
        pages = PageShape.of(call.key_pages.shape, call.layout)
        known = requests(rng, call, call.key.shape[1], pages.pages, pages.page_size)
        return super().random_inputs(call, rng, **{**known, **given})

    def dimensions(self, call: PagedCacheUpdateCall) -> Mapping[str, str]:
        shape = call.key_pages.shape
        head = _pages.head_factor(call.key.shape[2], shape, call.layout, "key")
        pages = [_pages.page_dims(shape, call.layout, "b", head, channel) for channel in ("d", "v")]
        return {
            "key": f"b n {head} d",
            "value": f"b n {head} v",
            "key_pages": pages[0],
            "value_pages": pages[1],
            "query_start_loc": "b? l",
            "kv_lens": "b? r",
            "block_tables": "b? r w",
            "key_scale": f"b? {head}?",
            "value_scale": f"b? {head}?",
        }

    def output_specs(self, call: PagedCacheUpdateCall) -> PagedCacheUpdateOutputs:
        return PagedCacheUpdateOutputs(call.key_pages, call.value_pages)

    def public(self, call: PagedCacheUpdateCall) -> tuple[str, ...]:
        return ("key_pages",) if call.value_pages is None else ("key_pages", "value_pages")

    def cost(self, call: PagedCacheUpdateCall, phase: Phase) -> Cost:
        """Forward, the pages are updated in place; backward, their gradients are copied."""
        new = call.key.nbytes + call.value.nbytes
        stored = (call.key.size + call.value.size) * np.dtype(call.key_pages.dtype).itemsize if phase == "forward" else 0
        if phase == "forward":
            return Cost(0, new + stored)
        pages = sum(spec.nbytes for spec in (call.key_pages, call.value_pages) if spec is not None and has_gradient(spec))
        return Cost(0, new + 2 * pages)


def _check_fits(name: str, new: Any, shape: PageShape, layout: str) -> None:
    heads, size = new.shape[1:]
    fits = heads <= shape.heads and size <= shape.head_size
    if (heads, size) != (shape.heads, shape.head_size) and not (layout in FUSED and fits):
        room = "at most " if layout in FUSED else ""
        remedy = f"layout={layout!r} reads the cache as {_pages.LAYOUTS[layout]}"
        raise invalid(name, f"{heads} heads of size {size}", f"{room}{shape.heads} of size {shape.head_size}", remedy=remedy)


OPERATION = PagedCacheUpdate()
