"""What every launch of a call has in common, and segments as decays to nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from ejkernel.call import ArraySpec, vary_like
from ejkernel.operations.common.packed import segment_starts, zero_outside
from ejkernel.operations.delta_rule.interface import DeltaRuleCall, DeltaRuleInputs
from ejkernel_triton._blocks import dot_block
from ejkernel_triton._chunks import chunks_of
from ejkernel_triton.delta_rule.config import Config, GradientConfig
from ejkernel_triton.delta_rule.params import params_of

TOKENS = ("query", "key", "value", "beta", "decay", "a", "b")
"""Arrays with an axis of tokens."""


class Problem:
    """What every launch of a call has in common."""

    def __init__(self, call: DeltaRuleCall, inputs: DeltaRuleInputs, chunk: int) -> None:
        self.call, self.inputs, self.chunk = call, inputs, chunk
        self.batch, self.length = call.query.shape[:2]
        self.rule = params_of(call)
        self.whole = call.cu_seqlens is None and bool(chunk) and self.length % chunk == 0
        self.bounds, self.first, self.sequence = self._table()
        self.chunks = self.sequence.shape[1] if call.cu_seqlens is not None else -(-self.length // max(chunk, 1))
        self.dtype = jnp.bfloat16 if self.rule.bfloat16 else jnp.float32
        self.by_channel = call.decays_by_channel

    def _table(self) -> tuple[Any, Any, Any]:
        """Where sequences lie, the tokens after the last of them as one more; absent: `query` stands in."""
        bounds = self.inputs.cu_seqlens
        if bounds is None:
            return (self.inputs.query,) * 3
        bounds = jnp.pad(bounds, ((0, 0), (0, 1)), constant_values=self.length)
        return tuple(chunks_of(bounds, self.length, self.chunk or self.length))

    @property
    def sequences(self) -> int:
        """Of a walk: with packed sequences, the tokens after them too."""
        return self.call.sequences + (self.call.cu_seqlens is not None)

    @property
    def tokens(self) -> tuple[int, int, int]:
        return self.batch, self.length, self.call.heads

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.call.heads, self.call.query.shape[3], self.call.value.shape[3]

    @property
    def final_shape(self) -> tuple[int, ...]:
        return self.batch, self.call.sequences, *self.state_shape

    def or_query(self, *arrays: Any) -> tuple[Any, ...]:
        return tuple(self.inputs.query if array is None else array for array in arrays)

    def scan_launch(self, config: Config | GradientConfig) -> dict[str, Any]:
        """Of a kernel whose programs hold a state."""
        channels = self.call.value.shape[3]
        block = min(config.block_v, dot_block(channels))
        return {
            "grid": self.batch * self.sequences * self.call.heads * -(-channels // block),
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "R": self.rule,
            "CHUNK": self.chunk,
            "BLOCK_K": dot_block(self.call.query.shape[3]),
            "BLOCK_V": block,
            "WHOLE": self.whole,
        }


def segment_marks(call: DeltaRuleCall, inputs: DeltaRuleInputs) -> tuple[Any, Any]:
    """Which tokens take part, and before which of them the state becomes 0 `[1 or b, t]`."""
    ids = jnp.flip(inputs.seg_ids, 1) if call.reverse else inputs.seg_ids
    part, fresh = segment_starts(ids)
    return (jnp.flip(part, 1), jnp.flip(fresh, 1)) if call.reverse else (part, fresh)


def without_segments(call: DeltaRuleCall, inputs: DeltaRuleInputs) -> tuple[DeltaRuleCall, DeltaRuleInputs, Any]:
    """The same call with a decay to nothing before each new segment, zeros at tokens that take no part, and which take part."""
    part, fresh = segment_marks(call, inputs)
    names = [name for name in TOKENS if getattr(inputs, name) is not None]
    arrays = {name: where(part, getattr(inputs, name)) for name in names}
    if "b" in arrays:  # which reads before the decay
        arrays["b"] = where(~fresh, arrays["b"])
    decay = arrays.get("decay")
    if decay is None:
        decay = vary_like(jnp.zeros((*call.query.shape[:2], 1), jnp.float32), inputs)
    arrays["decay"] = jnp.where(beside(fresh, decay), -jnp.inf, decay)
    found = inputs._replace(**arrays, seg_ids=None)
    return dataclasses.replace(call, seg_ids=None, decay=ArraySpec.of(arrays["decay"])), found, part


def beside(tokens: Any, array: Any) -> Any:
    """`[1 or b, t]` with the axes of an array."""
    return tokens.reshape(*tokens.shape, *[1] * (array.ndim - 2))


def where(tokens: Any, array: Any) -> Any:
    """An array with zeros at the other tokens."""
    return zero_outside(tokens, array)[0]
