"""Means over the tokens that a mask admits."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.call.arrays import statistics_dtype
from ejkernel.call.records import Bound
from ejkernel.errors import invalid, wrong_type
from ejkernel.operations.common.packed import zero_outside
from ejkernel.operations.mean_pooling.interface import OPERATION
from ejkernel.utils.checks import check_array, check_compute, check_shape


def masked_mean(*, x: Any, cu_seqlens: Any, attention_mask: Any) -> Bound:
    """The mean over all T tokens in float32, with zeros for those that do not count, times `T / count`."""
    if cu_seqlens is not None:
        raise invalid("attention_mask", "an array", "None beside cu_seqlens", remedy="pack the tokens that count")
    check_compute("x", x)
    check_array("attention_mask", attention_mask, floating=False)
    if jnp.issubdtype(attention_mask.dtype, jnp.complexfloating):
        raise wrong_type("attention_mask", f"dtype {attention_mask.dtype}", "bool, or 0 and 1")
    check_shape("attention_mask", attention_mask, tuple(x.shape[:2]), "[B, T] as x")
    part = attention_mask if attention_mask.dtype == bool else attention_mask != jnp.zeros((), attention_mask.dtype)
    wide = statistics_dtype(str(x.dtype))
    bound = OPERATION.canonicalise(zero_outside(part, x)[0].astype(wide))
    count = jnp.maximum(jnp.sum(part, axis=1, dtype=jnp.int32), 1)
    factor = jnp.asarray(max(x.shape[1], 1), wide) / count.astype(wide)

    def finish(outputs: Any) -> Any:
        means = bound.finish(outputs)
        return (means * factor.reshape(-1, *[1] * (means.ndim - 1))).astype(x.dtype)

    return Bound(bound.call, bound.inputs, finish)
