"""Attention without a batch axis."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.call.records import Bound
from ejkernel.operations.flash_attention.interface import OPERATION
from ejkernel.utils.checks import check_array


def unbatched(*, query: Any, key: Any, value: Any, **rest: Any) -> Bound:
    """Canonicalise `[T, H, D]`, `[S, K, D]`, `[S, K, V]` as a batch of one."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        check_array(name, array, ndim=3)
    bound = OPERATION.canonicalise(query[None], key[None], value[None], **rest)
    return Bound(bound.call, bound.inputs, lambda outputs: jax.tree.map(lambda array: array[0], bound.finish(outputs)))
