"""Gradients of the inputs from those of all heads, of log decays and of the first states: sums over what heads share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from ejkernel.call import vary_like
from ejkernel.operations.linear_recurrence.interface import LinearRecurrenceInputs


def input_gradients(
    inputs: LinearRecurrenceInputs, gradients: Iterable[Any], d_logs: Any, d_initial: Any
) -> LinearRecurrenceInputs:
    """The gradients of the inputs.

    Args:
        inputs: the call's.
        gradients: of query, key and value `[b, t, H or parts, d or v]`, and perhaps of value_scale and skip.
        d_logs: of a token's total log decay: with decays per channel `[b, t, H, d]`, per head `[blocks, b, t, H]`, without decays
            ignored.
        d_initial: of the states before sequences; ignored without an initial state.
    """
    d_query, d_key, d_value, *d_scales = gradients
    return LinearRecurrenceInputs(
        query=_shared(d_query, inputs.query, 2),
        key=_shared(d_key, inputs.key, 2),
        value=_shared(d_value, inputs.value, 2),
        **_decay_gradients(inputs, d_logs),
        **_scale_gradients(inputs, *d_scales),
        initial_state=None if inputs.initial_state is None else d_initial.astype(inputs.initial_state.dtype),
    )


def _decay_gradients(inputs: LinearRecurrenceInputs, d_logs: Any) -> dict[str, Any]:
    """The gradients of g, gk and g_gamma from that of a token's total log decay."""
    found: dict[str, Any] = {}
    if inputs.g is None and inputs.gk is None and inputs.g_gamma is None:
        return found
    if inputs.gk is not None:
        found["gk"] = _shared(d_logs, inputs.gk, 2)
        per_head = jnp.sum(d_logs, axis=3)
    else:
        per_head = jnp.sum(d_logs, axis=0)
    if inputs.g is not None:
        found["g"] = _shared(per_head, inputs.g, 2)
    if inputs.g_gamma is not None:
        found["g_gamma"] = _shared(_of_rows(jnp.sum(per_head, axis=1), inputs.g_gamma), inputs.g_gamma, 1)
    return found


def _scale_gradients(inputs: LinearRecurrenceInputs, d_scale: Any = None, d_skip: Any = None) -> dict[str, Any]:
    """The gradients of value_scale and skip from those of blocks `[blocks, b, t, H]` and of chunks, `[blocks, b, chunks, H]`."""
    found = {}
    if inputs.value_scale is not None:
        found["value_scale"] = _shared(jnp.sum(d_scale, axis=0), inputs.value_scale, 2)
    if inputs.skip is not None:
        total = jnp.sum(d_skip, axis=(0, 2))[..., None]
        found["skip"] = _shared(_of_rows(total, inputs.skip), inputs.skip, 1)
    return found


def _of_rows(gradient: Any, like: Any) -> Any:
    """The gradient of every batch member, summed if they share one row."""
    return jnp.sum(gradient, axis=0, keepdims=True) if like.shape[0] == 1 else gradient


def _shared(gradient: Any, like: Any, axis: int) -> Any:
    """The gradient of all H heads, summed over the heads that share one."""
    kept = like.shape[axis]
    if gradient.shape[axis] != kept:
        shape = gradient.shape
        grouped = gradient.reshape(*shape[:axis], kept, shape[axis] // kept, *shape[axis + 1 :])
        gradient = jnp.sum(grouped.astype(jnp.float32), axis=axis + 1)
    return gradient.astype(like.dtype)


def zero_gradients(inputs: LinearRecurrenceInputs, d_final: Any) -> LinearRecurrenceInputs:
    """Gradients if no token is in a sequence."""
    zeros = {
        name: None if x is None or name == "cu_seqlens" else vary_like(jnp.zeros(x.shape, x.dtype), inputs)
        for name, x in inputs._asdict().items()
    }
    if inputs.initial_state is not None and d_final is not None:
        zeros["initial_state"] = d_final.astype(inputs.initial_state.dtype)
    return LinearRecurrenceInputs(**zeros)
