"""KV page layouts and dtypes. Does not import Triton."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.call import ArraySpec
from ejkernel.operations.common.pages import PageStrides
from ejkernel.plugin import Target
from ejkernel_triton._capability import FLOATS

ONE_BYTE = ("int8", "float8_e4m3fn", "float8_e5m2")
STORED = (*FLOATS, *ONE_BYTE)
E4M3_SINCE = (8, 9)

MAX_SEARCH_BLOCK = 1024
"""Largest block of requests that `count_up_to` loads at once."""


def strides_of(shape: tuple[int, ...], layout: str) -> PageStrides:
    """Strides of pages of a canonical shape; the batch stride is 0 if the batch shares them."""
    found = PageStrides.of(shape, layout)
    return found if shape[0] > 1 else found._replace(batch=0)


def e4m3_problem(target: Target, *specs: ArraySpec | None) -> str | None:
    """Why arrays of float8_e4m3fn cannot be read or written there, if one of these is."""
    if target.capability is None or target.capability >= E4M3_SINCE:
        return None
    if not any(spec is not None and spec.dtype == "float8_e4m3fn" for spec in specs):
        return None
    return f"Triton has no float8_e4m3fn below compute capability 8.9, {target} has {target.compute_capability}"


def with_common_batch(inputs: Any) -> Any:
    """Broadcast `query_start_loc` and `kv_lens` to a common batch size, 1 or b."""
    members = max(inputs.query_start_loc.shape[0], inputs.kv_lens.shape[0])
    starts, lengths = (jnp.broadcast_to(x, (members, x.shape[1])) for x in (inputs.query_start_loc, inputs.kv_lens))
    return inputs._replace(query_start_loc=starts, kv_lens=lengths)


def search_block(requests: int) -> int:
    """Requests that `count_up_to` loads at once; a power of two."""
    return min(MAX_SEARCH_BLOCK, 1 << max(requests - 1, 0).bit_length())


def storage(array: Any) -> int:
    """0: absent, 1: shared by the batch, 2: one per batch member."""
    return 0 if array is None else 1 if array.shape[0] == 1 else 2


def batch_stride(array: Any) -> int:
    return 0 if array is None or array.shape[0] == 1 else array.size // array.shape[0]
