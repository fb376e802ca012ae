"""What other libraries of this kind call the parts of a mask: views that are computed when they are read, and never kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.errors import TracingError, invalid
from ejkernel.masks import _checks, _derive
from ejkernel.masks._parts import Parts

AxisName = str | tuple[str, ...] | None


class MaskSharding(NamedTuple):
    """PartitionSpecs of a mask's arrays, None for those that it does not have."""

    attention_mask: jax.sharding.PartitionSpec | None = None
    q_segment_ids: jax.sharding.PartitionSpec | None = None
    kv_segment_ids: jax.sharding.PartitionSpec | None = None
    cu_seqlens_q: jax.sharding.PartitionSpec | None = None
    cu_seqlens_kv: jax.sharding.PartitionSpec | None = None
    q_positions: jax.sharding.PartitionSpec | None = None
    kv_positions: jax.sharding.PartitionSpec | None = None


class Spellings(Parts):
    """Other names of what `MaskInfo` holds."""

    batch_axis_name: AxisName
    qheads_axis_name: AxisName
    sequence_axis_name: AxisName

    @property
    def q_segment_ids(self) -> Any:
        """Query segments as said, lengths included. From a dense mask only padding: 0 for queries that see a key, -1 else."""
        return _derive.segment_ids(self, "query")

    @property
    def kv_segment_ids(self) -> Any:
        """Key segments as said, lengths included. From a dense mask only padding: 0 for keys that are seen, -1 else."""
        return _derive.segment_ids(self, "key")

    @property
    def _q_segment_ids(self) -> Any:
        return self.query_segments

    @property
    def _kv_segment_ids(self) -> Any:
        return self.key_segments

    @property
    def q_attention_mask(self) -> Any:
        """int32 `[B, T]`: 1 for valid queries, 0 for padding."""
        segments = self.q_segment_ids
        return None if segments is None else (segments >= 0).astype(jnp.int32)

    @property
    def q_positions(self) -> Any:
        """Query positions if they were said."""
        return self.query_positions

    @property
    def kv_positions(self) -> Any:
        """Key positions if they were said."""
        return self.key_positions

    @property
    def q_position_ids(self) -> Any:
        """Query positions as said, else counted within each segment; -1 on padding that no position was said for."""
        if self.query_positions is not None:
            return self.query_positions
        segments = self.q_segment_ids
        return None if segments is None else _derive.positions_from_segments(segments)

    @property
    def q_lens(self) -> Any:
        """Valid queries: int32 `[B]`, or `[segments]` over the batch where several segments are packed.

        Raises:
            TracingError: the segments are traced, so that their number is not known.
        """
        return _lengths("q_lens", self.q_segment_ids)

    @property
    def kv_lens(self) -> Any:
        """Valid keys, see `q_lens`."""
        return _lengths("kv_lens", self.kv_segment_ids)

    @property
    def is_multi_sequence(self) -> Any:
        """Whether a segment other than 0 was said, a bool array."""
        said = [segments for segments in (self.query_segments, self.key_segments) if segments is not None]
        return jnp.max(said[0], initial=-1) > 0 if said else jnp.zeros((), jnp.bool_)

    def is_self_attention(self) -> Any:
        """Whether queries and keys are one sequence: as many, and in the same segments if both were said. A bool array."""
        same = self.q_len is not None and self.q_len == self.kv_len
        if same and self.query_segments is not None and self.key_segments is not None:
            return (self.query_segments == self.key_segments).all()
        return jnp.asarray(same)

    def get_or_compute_segment_ids(self) -> tuple[Any, Any]:
        """`(q_segment_ids, kv_segment_ids)`; an error where a size is unknown."""
        self.known_sizes("get_or_compute_segment_ids")
        return self.q_segment_ids, self.kv_segment_ids

    def get_or_compute_positions(self) -> tuple[Any, Any]:
        """Positions of queries and keys as said, else counted within segments: -1 on padded queries, 2^31 - 1 on padded keys."""
        keys = self.key_positions
        if keys is None and self.kv_segment_ids is not None:
            keys = _derive.positions_from_segments(self.kv_segment_ids)
            keys = jnp.where(keys < 0, jnp.iinfo(jnp.int32).max, keys)
        return self.q_position_ids, keys

    def get_qkv_masks(self, dtype: Any = jnp.bool_) -> tuple[Any, Any, Any]:
        """Valid queries `[B, T]`, valid keys `[B, S]`, and who sees whom `[B, H|1, T, S]`, in `dtype`."""
        queries, keys = self.get_or_compute_segment_ids()
        seen = self.materialize()
        batch = max(queries.shape[0], keys.shape[0], seen.shape[0])
        masks = (queries >= 0, keys >= 0, seen)
        queries, keys, seen = (jnp.broadcast_to(mask, (batch, *mask.shape[1:])).astype(dtype) for mask in masks)
        return queries, keys, seen

    def materialize_attention_mask(self, dtype: Any = jnp.bool_) -> Self:
        """The same visibility with the dense mask stored; `attention_mask` reads it in `dtype`."""
        self.known_sizes("materialize_attention_mask")
        return self.replace(dense=self.materialize()).to_dtype(dtype)

    def to_dtype(self, dtype: Any) -> Self:
        """The same mask, whose `attention_mask` is read in `dtype`."""
        return self.replace(attention_mask_dtype=dtype)

    @staticmethod
    def get_empty_sharding() -> MaskSharding:
        """No specs."""
        return MaskSharding()

    def get_shardings(self, sequence_parallel: bool = False, *, mesh: Any) -> MaskSharding:
        """Specs of this mask's arrays by its axis names; an axis that does not divide a size does not split it.

        Args:
            sequence_parallel: split the sequence too, over `sequence_axis_name`.
            mesh: the mesh whose axes they are.

        Raises:
            ValueError: an axis name that the mesh does not have.
        """
        sequence = self.sequence_axis_name if sequence_parallel else None
        names = {
            "batch_axis_name": self.batch_axis_name,
            "qheads_axis_name": self.qheads_axis_name,
            "sequence_axis_name": sequence,
        }
        for field, name in names.items():
            missing = sorted({*_axes(name)} - {*mesh.axis_names})
            if missing:
                got = f"{name!r} on a mesh with the axes {', '.join(map(str, mesh.axis_names))}"
                raise invalid(field, got, "axes of the mesh", remedy=f"set it with replace({field}=...)")
        rows = (self.batch_axis_name, sequence)
        arrays = {
            "attention_mask": (self.dense, (self.batch_axis_name, self.qheads_axis_name, sequence, None)),
            "q_segment_ids": (self.query_segments, rows),
            "kv_segment_ids": (self.key_segments, rows),
            "q_positions": (self.query_positions, rows),
            "kv_positions": (self.key_positions, rows),
        }
        return MaskSharding(
            **{field: _spec(array, wanted, mesh) for field, (array, wanted) in arrays.items() if array is not None}
        )


def _lengths(name: str, segments: Any) -> Any:
    if segments is None:
        return None
    if not _checks.is_concrete(segments):
        raise TracingError(f"{name}: how many segments there are is not known while tracing; read it outside of jax.jit")
    known = np.asarray(segments)
    if known.size and known.max() > 0:
        return jnp.asarray(np.bincount(known[known >= 0]), jnp.int32)
    return jnp.asarray((known >= 0).sum(-1), jnp.int32)


def _axes(name: AxisName) -> tuple[str, ...]:
    return () if name is None else (name,) if isinstance(name, str) else tuple(name)


def _spec(array: Any, wanted: Sequence[AxisName], mesh: Any) -> jax.sharding.PartitionSpec:
    parts = [
        name if name is not None and size % math.prod(mesh.shape[axis] for axis in _axes(name)) == 0 else None
        for size, name in zip(array.shape, wanted, strict=True)
    ]
    return jax.sharding.PartitionSpec(*parts)
