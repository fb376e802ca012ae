"""How tokens are cut into chunks, and chunks into steps."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.operations.delta_rule.interface import DeltaRuleCall, DeltaRuleInputs
from ejkernel_xla.delta_rule.config import DeltaRuleConfig
from ejkernel_xla.delta_rule.steps import Marks


@dataclasses.dataclass(frozen=True)
class Grid:
    """`steps` times `chunks` chunks of `size` tokens."""

    steps: int
    chunks: int
    size: int

    @classmethod
    def of(cls, call: DeltaRuleCall, config: DeltaRuleConfig) -> Grid:
        length = call.query.shape[1]
        size = min(config.chunk_size, length)
        if call.cu_seqlens is not None:
            # every sequence may leave a part of a chunk empty
            size = min(size, -(-2 * length // call.sequences))
        size = 1 << (size - 1).bit_length()
        chunks = -(-length // size)
        if call.cu_seqlens is not None:
            chunks = min((length + call.sequences * (size - 1)) // size, length)
        steps = -(-chunks // (config.chunks_per_step if call.use_chunked else 1))
        return cls(steps, -(-chunks // steps), size)

    @property
    def places(self) -> int:
        return self.steps * self.chunks * self.size

    def cut(self, array: Any) -> Any:
        """`[b, places, h, ...] -> [steps, chunks, b, h, size, ...]`."""
        array = array.reshape(array.shape[0], self.steps, self.chunks, self.size, *array.shape[2:])
        return jnp.moveaxis(array, (1, 2, 0, 4, 3), (0, 1, 2, 3, 4))

    def joined(self, array: Any) -> Any:
        """`[steps, chunks, b, h, size, ...] -> [b, places, h, ...]`."""
        array = jnp.moveaxis(array, (0, 1, 2, 3, 4), (1, 2, 0, 4, 3))
        return array.reshape(array.shape[0], self.places, *array.shape[4:])

    def cut_marks(self, array: Any) -> Any:
        """`[1 or b, chunks of all steps, ...] -> [steps, chunks, 1 or b, ...]`."""
        return jnp.moveaxis(array.reshape(array.shape[0], self.steps, self.chunks, *array.shape[2:]), 0, 2)


class Rows:
    """Every row of the batch is one sequence, perhaps of segments."""

    def __init__(self, call: DeltaRuleCall, inputs: DeltaRuleInputs, grid: Grid) -> None:
        self.call, self.grid = call, grid
        self.part, self.marks = None, Marks()
        if inputs.seg_ids is not None:
            self.part = inputs.seg_ids >= 0
            self.marks = self._ranks(jnp.flip(inputs.seg_ids, 1) if call.reverse else inputs.seg_ids)

    def _ranks(self, ids: Any) -> Marks:
        """How often the state became 0: wherever a token's id is not that of the last one before it that took part."""
        places = jnp.arange(ids.shape[1], dtype=jnp.int32)
        last = jax.lax.cummax(jnp.where(ids >= 0, places, -1), axis=1)
        last = jnp.concatenate([jnp.full_like(last[:, :1], -1), last[:, :-1]], axis=1)
        changes = (ids >= 0) & (last >= 0) & (ids != jnp.take_along_axis(ids, jnp.maximum(last, 0), axis=1))
        rank = jnp.cumsum(changes, axis=1, dtype=jnp.int32)
        rank = jnp.pad(rank, ((0, 0), (0, self.grid.places - rank.shape[1])), mode="edge")
        rank = rank.reshape(rank.shape[0], -1, self.grid.size)
        before = jnp.concatenate([jnp.zeros_like(rank[:, :1, -1]), rank[:, :-1, -1]], axis=1)
        return Marks(self.grid.cut_marks(rank), self.grid.cut_marks(before))

    def _only_part(self, array: Any) -> Any:
        return array if self.part is None else jnp.where(_beside(self.part, array), array, 0)

    def cut(self, array: Any) -> Any:
        """`[b, t, h, ...] -> [steps, chunks, b, h, size, ...]`, zeros where no token takes part."""
        array = self._only_part(array)
        array = jnp.flip(array, 1) if self.call.reverse else array
        padding = [(0, 0)] * array.ndim
        padding[1] = (0, self.grid.places - array.shape[1])
        return self.grid.cut(jnp.pad(array, padding))

    def joined(self, array: Any) -> Any:
        """The way back."""
        array = self.grid.joined(array)[:, : self.call.query.shape[1]]
        return self._only_part(jnp.flip(array, 1) if self.call.reverse else array)


class Packed:
    """Sequences one after another. Each has chunks of its own, but for sequences of one token, which take a step by themselves."""

    def __init__(self, call: DeltaRuleCall, inputs: DeltaRuleInputs, grid: Grid) -> None:
        self.call, self.grid = call, grid
        places = functools.partial(_places, call, grid)
        self.at: _Places = jax.vmap(places)(inputs.cu_seqlens)
        self.marks = Marks(first=grid.cut_marks(self.at.first))
        self.used = jnp.max(self.at.used)

    def cut(self, array: Any) -> Any:
        """`[b, t, h, ...] -> [steps, chunks, b, h, size, ...]`, zeros where no token takes part."""
        return self.grid.cut(_pick(array, self.at.token, self.at.holds))

    def joined(self, array: Any) -> Any:
        """The way back; 0 for tokens that are in no chunk."""
        return _pick(self.grid.joined(array), self.at.place, self.at.in_chunk)

    def starts(self, states: Any) -> Any:
        """The state of every sequence, `[b, n, ...]`, beside the chunk with which it begins, `[steps, chunks, b, ...]`."""
        return self.grid.cut_marks(_pick(states, self.at.sequence, self.at.first))

    def starts_gradient(self, array: Any) -> Any:
        """`[steps, chunks, b, ...] -> [b, n, ...]`, of sequences that have chunks."""
        return _pick(self._by_chunk(array), self.at.first_chunk, self.at.has_chunks)

    def ends(self, array: Any) -> Any:
        """The state after the last chunk of every sequence that has one, `[steps, chunks, b, ...] -> [b, n, ...]`."""
        return _pick(self._by_chunk(array), self.at.last_chunk, self.at.has_chunks)

    def ends_gradient(self, states: Any) -> Any:
        """`[b, n, ...] -> [steps, chunks, b, ...]`."""
        return self.grid.cut_marks(_pick(states, self.at.sequence, self.at.last))

    def _by_chunk(self, array: Any) -> Any:
        array = jnp.moveaxis(array, 2, 0)
        return array.reshape(array.shape[0], self.grid.steps * self.grid.chunks, *array.shape[3:])

    def single(self, array: Any) -> Any:
        """The token of every sequence that has one alone, `[b, t, h, ...] -> [1, b n, h, 1, ...]`."""
        array = _pick(array, self.at.start, self.at.is_single)
        return array.reshape(1, array.shape[0] * array.shape[1], array.shape[2], 1, *array.shape[3:])

    def singles(self, array: Any) -> Any:
        """`[b n, ...] -> [b, n, ...]`."""
        return array.reshape(self.call.query.shape[0], self.call.sequences, *array.shape[1:])

    def to_tokens(self, array: Any) -> Any:
        """What belongs to sequences of one token, `[1, b n, h, 1, ...]`, at these tokens, `[b, t, h, ...]`."""
        return _pick(self.singles(array[0, :, :, 0]), self.at.sequence_of, self.at.of_single)


class _Places(NamedTuple):
    """Where everything stands, for one row: of places, of tokens, of chunks, of sequences."""

    token: Any
    holds: Any
    place: Any
    in_chunk: Any
    sequence_of: Any
    of_single: Any
    sequence: Any
    first: Any
    last: Any
    start: Any
    is_single: Any
    has_chunks: Any
    first_chunk: Any
    last_chunk: Any
    used: Any


def _places(call: DeltaRuleCall, grid: Grid, bounds: Any) -> _Places:
    length, size = call.query.shape[1], grid.size
    start, end = bounds[:-1], jnp.minimum(bounds[1:], length)
    lengths = end - start
    counts = jnp.where(lengths > 1, -(-lengths // size), 0)
    up_to = jnp.cumsum(counts)
    before = up_to - counts

    chunk = jnp.arange(grid.steps * grid.chunks, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(up_to, chunk, side="right"), call.sequences - 1)
    used = chunk < up_to[-1]
    index = ((chunk - before[sequence]) * size)[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    holds = used[:, None] & (index < lengths[sequence][:, None])
    token = end[sequence][:, None] - 1 - index if call.reverse else start[sequence][:, None] + index

    tokens = jnp.arange(length, dtype=jnp.int32)
    sequence_of = jnp.minimum(jnp.searchsorted(end, tokens, side="right"), call.sequences - 1)
    inside = (tokens >= start[sequence_of]) & (tokens < end[sequence_of])
    offset = end[sequence_of] - 1 - tokens if call.reverse else tokens - start[sequence_of]
    return _Places(
        token=jnp.clip(token, 0, length - 1).reshape(-1),
        holds=holds.reshape(-1),
        place=jnp.clip(before[sequence_of] * size + offset, 0, grid.places - 1),
        in_chunk=inside & (lengths[sequence_of] > 1),
        sequence_of=sequence_of,
        of_single=inside & (lengths[sequence_of] == 1),
        sequence=sequence,
        first=used & (chunk == before[sequence]),
        last=used & (chunk == up_to[sequence] - 1),
        start=jnp.clip(start, 0, length - 1),
        is_single=lengths == 1,
        has_chunks=counts > 0,
        first_chunk=jnp.clip(before, 0, chunk.shape[0] - 1),
        last_chunk=jnp.clip(up_to - 1, 0, chunk.shape[0] - 1),
        used=up_to[-1],
    )


def _beside(mask: Any, array: Any) -> Any:
    return mask.reshape(*mask.shape, *[1] * (array.ndim - mask.ndim))


def _pick(array: Any, index: Any, mask: Any) -> Any:
    """`array[row, index[row]]` for every row, 0 where the mask is False; index and mask `[1 or b, m]`."""
    picked = jnp.take(array, index[0], axis=1) if index.shape[0] == 1 else jax.vmap(lambda row, i: row[i])(array, index)
    return jnp.where(_beside(mask, picked), picked, 0)
