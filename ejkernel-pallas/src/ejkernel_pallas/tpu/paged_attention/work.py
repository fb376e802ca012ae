"""Static parameters, prefetched scalars, and the scalars of one work item."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.operations.paged_attention.interface import PagedAttentionCall
from ejkernel_pallas.tpu._integers import quotient, quotient_up, remainder
from ejkernel_pallas.tpu._pages import Pages
from ejkernel_pallas.tpu.paged_attention.config import Shape
from ejkernel_pallas.tpu.paged_attention.schedule import Items, Requests


class Scalars(NamedTuple):
    """Prefetched scalars in SMEM. Tables are flattened; factors are per batch member and key head."""

    count: Any
    items: Items
    requests: Requests
    tables: Any
    key_factor: Any
    value_factor: Any


@dataclasses.dataclass(frozen=True)
class Params:
    """Static parameters."""

    call: PagedAttentionCall
    shape: Shape
    sources: tuple[Pages, ...]
    product: Any
    precision: Any
    cores: int

    @property
    def table_width(self) -> int:
        return self.call.block_tables.shape[2]

    @property
    def page_size(self) -> int:
        return self.call.pages.page_size

    def dot(self, left: Any, right: Any, contracted: int) -> Any:
        """`left [m, c]` times `right`, whose axis `contracted` is c."""
        return jax.lax.dot_general(
            left,
            right,
            (((1,), (contracted,)), ((), ())),
            precision=self.precision,
            preferred_element_type=jnp.float32,
        )


@dataclasses.dataclass(frozen=True)
class Work:
    """The scalars of an item: its tokens and positions, and the keys that some or all of them see."""

    params: Params
    scalars: Scalars
    item: Any

    @property
    def request(self) -> Any:
        return self.scalars.items.request[self.item]

    @property
    def member(self) -> Any:
        return quotient(self.request, self.params.call.kv_lens.shape[1])

    @property
    def base(self) -> Any:
        return self.scalars.items.base[self.item]

    @property
    def low(self) -> Any:
        return self.scalars.items.low[self.item]

    @property
    def high(self) -> Any:
        return self.scalars.items.high[self.item]

    @property
    def single(self) -> Any:
        return self.high - self.low == 1

    @property
    def position(self) -> Any:
        """Position of token `base`."""
        return self.scalars.requests.shift[self.request] + self.base

    @property
    def length(self) -> Any:
        return self.scalars.requests.length[self.request]

    @property
    def first_new(self) -> Any:
        """Key of the request's first new token."""
        return self.scalars.requests.shift[self.request] + self.scalars.requests.start[self.request]

    @property
    def begin(self) -> Any:
        window = self.params.call.window
        return 0 if window is None else jnp.maximum(self.position + self.low - (window - 1), 0)

    @property
    def stop(self) -> Any:
        last = self.position + self.high if self.params.call.causal else self.length
        return jnp.maximum(jnp.minimum(last, self.length), 0)

    @property
    def first_page(self) -> Any:
        return 0 if self.params.call.window is None else quotient(self.begin, self.params.page_size)

    @property
    def steps(self) -> Any:
        """Number of steps, at least one, which may load nothing."""
        keys = self.stop - self.first_page * self.params.page_size
        return jnp.maximum(quotient_up(keys, self.params.shape.keys), 1)

    def first_key(self, step: Any) -> Any:
        return self.first_page * self.params.page_size + step * self.params.shape.keys

    def pages_of(self, step: Any) -> tuple[Any, Any]:
        """The first page of a step, as an index into its request, and the number of pages to load."""
        first = self.first_page + step * self.params.shape.pages
        return first, jnp.clip(quotient_up(self.stop, self.params.page_size) - first, 0, self.params.shape.pages)

    def is_full(self, step: Any) -> Any:
        """Whether a step loads a full buffer of valid pages."""
        return (self.pages_of(step)[1] == self.params.shape.pages) & (self.scalars.requests.complete[self.request] != 0)

    def page(self, index: Any) -> tuple[Any, Any]:
        """The physical page of a logical page, and whether it is valid."""
        params = self.params
        row = self.request
        if params.call.block_tables.shape[0] == 1 and params.call.query.shape[0] > 1:
            row = remainder(row, params.call.kv_lens.shape[1])
        page = self.scalars.tables[row * params.table_width + index]
        return page, (page >= 0) & (page < params.call.pages.pages)

    def seen_by_all(self, step: Any) -> Any:
        """Whether every token of the item sees every key of the step, if all pages are there, and none has a bias."""
        call, key = self.params.call, self.first_key(step)
        last = key + self.params.shape.keys
        limit = jnp.minimum(self.position + self.low + 1, self.length) if call.causal else self.length
        seen = last <= limit
        if call.window is not None:
            seen &= key > self.position + self.high - 1 - call.window
        if call.qq_bias is not None:
            seen &= last <= self.first_new
        return seen
