"""One call with its arrays and config, and the sizes that all of its launches share."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.operations.linear_recurrence.interface import LinearRecurrenceCall, LinearRecurrenceInputs
from ejkernel_triton.linear_recurrence.config import Config
from ejkernel_triton.linear_recurrence.params import forward_params
from ejkernel_triton.linear_recurrence.segments import Segments, segments_of


class Problem:
    """A call, its arrays and its config.

    Attributes:
        call, inputs, config: as given.
        batch, length, heads: b, t and H.
        params: the recurrence of the forward phase.
        channel_logs: decays per channel `[b, t, h, d]`; they include those per head.
        value_scale, skip: of the inputs.
        whole_chunks: whether every chunk has all of its tokens.

    The query is a placeholder for absent arrays.
    """

    def __init__(self, call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs, config: Config) -> None:
        self.call, self.inputs, self.config = call, inputs, config
        self.batch, self.length = call.query.shape[:2]
        self.heads = call.heads[1]
        self.params = forward_params(call)
        self.channel_logs = _channel_logs(call, inputs)
        self.value_scale, self.skip = self.or_query(inputs.value_scale, inputs.skip)
        self.whole_chunks = call.cu_seqlens is None and bool(config.chunk_size) and self.length % config.chunk_size == 0

    @property
    def state_shape(self) -> tuple[int, int]:
        return self.call.query.shape[3], self.call.value.shape[3]

    @property
    def final_shape(self) -> tuple[int, ...]:
        """Of the states after all sequences."""
        return self.batch, self.call.sequences, self.heads, *self.state_shape

    def or_query(self, *arrays: Any) -> tuple[Any, ...]:
        """The arrays, with the query for each that is None."""
        return tuple(self.inputs.query if array is None else array for array in arrays)

    def segments(self, size: int) -> Segments:
        """The call's tokens in segments of `size` tokens."""
        return segments_of(self.inputs.cu_seqlens, self.inputs.query, self.length, self.call.sequences, size)


def _channel_logs(call: LinearRecurrenceCall, inputs: LinearRecurrenceInputs) -> Any:
    if inputs.gk is None:
        return inputs.query
    if inputs.g is None and inputs.g_gamma is None:
        return inputs.gk
    heads = call.heads[1]
    logs = _every_head(inputs.gk.astype(jnp.float32), 2, heads)
    if inputs.g is not None:
        logs += _every_head(inputs.g.astype(jnp.float32), 2, heads)[..., None]
    if inputs.g_gamma is not None:
        logs += _every_head(inputs.g_gamma.astype(jnp.float32), 1, heads)[:, None, :, None]
    return logs


def _every_head(array: Any, axis: int, heads: int) -> Any:
    return array if array.shape[axis] == heads else jnp.repeat(array, heads // array.shape[axis], axis=axis)
