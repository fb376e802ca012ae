"""Attention: the arrays as the library's handler takes them.

Backward is another platform's, from the output and its log-sum-exp.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.operation import vary_like
from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs, FlashAttentionOutputs
from ejkernel_cuda._library import handler
from ejkernel_cuda.flash_attention.config import ForwardConfig, heads_side_by_side

_ELEMENTS = 8
"""Of a head are copied at once: 16 bytes."""


def band(call: FlashAttentionCall) -> tuple[int, int]:
    """`(below, above)`: query i sees keys i - below ... i + above.

    Beyond the farthest pair a limit has no effect, and what is smaller fits into 32 bits.
    """
    left, right = call.window or (None, None)
    if call.causal:
        right = 0 if right is None else min(right, 0)
    farthest = call.query.shape[1] + call.key.shape[1] + abs(call.query_offset)
    below, above = (farthest if side is None else min(side, farthest) for side in (left, right))
    return below - call.query_offset, above + call.query_offset


def _whole(array: Any) -> Any:
    """Heads of a multiple of 16 bytes."""
    missing = -array.shape[3] % _ELEMENTS
    return jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else array


def forward(call: FlashAttentionCall, inputs: FlashAttentionInputs, config: ForwardConfig) -> FlashAttentionOutputs:
    saved = call.return_lse or call.save_residuals
    rows, value_size = call.query.shape[:3], call.value.shape[3]
    if not np.prod(rows, dtype=object) * call.key.shape[1]:
        return _without_pairs(call, inputs, saved)
    query, key, value = (_whole(array) for array in inputs[:3])
    below, above = band(call)
    results = (
        jax.ShapeDtypeStruct((*rows, value.shape[3]), query.dtype),
        jax.ShapeDtypeStruct(rows if saved else (0,), jnp.float32),
    )
    out, lse = jax.ffi.ffi_call(handler("flash_attention_forward"), results)(
        query,
        key,
        value,
        below=np.int64(below),
        above=np.int64(above),
        scale=np.float32(call.scale),
        cap=np.float32(call.soft_cap or 0.0),
        pack=np.int64(heads_side_by_side(call) if config.packed else 1),
        take_turns=config.take_turns,
        persistent=config.persistent,
    )
    return FlashAttentionOutputs(out[..., :value_size], lse if saved else None)


def _without_pairs(call: FlashAttentionCall, inputs: FlashAttentionInputs, saved: bool) -> FlashAttentionOutputs:
    """No kernel is needed. Something of its own shows in a program that this platform served the call."""
    out = jnp.zeros((*call.query.shape[:3], call.value.shape[3]), call.query.dtype)
    lse = jnp.full(call.query.shape[:3], -jnp.inf, jnp.float32)
    out, lse = jax.lax.optimization_barrier(vary_like((out, lse), inputs))
    return FlashAttentionOutputs(out, lse if saved else None)
