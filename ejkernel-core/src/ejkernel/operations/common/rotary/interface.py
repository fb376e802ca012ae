"""What the operations that rotate queries and keys share: facts and checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.core
import numpy as np

from ejkernel.call.arrays import ArraySpec
from ejkernel.call.records import Call
from ejkernel.errors import invalid, wrong_type
from ejkernel.utils.checks import check_compute


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryCall(Call):
    """Static facts of a rotation.

    Attributes:
        rotary_dim: the first channels of each head, which are rotated; the others pass through.
        interleaved: pairs are channels (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
        heads_first: query and key are `[b, h, t, d]`.
    """

    query: ArraySpec
    cos: ArraySpec
    sin: ArraySpec
    rotary_dim: int
    interleaved: bool = False
    heads_first: bool = False

    @property
    def per_pair(self) -> bool:
        """Whether cos and sin hold one number per pair of channels instead of one per channel."""
        return 2 * self.cos.shape[-1] == self.rotary_dim


@dataclasses.dataclass(frozen=True)
class Rotation:
    """A checked rotation: arrays with a batch axis, and the facts of `RotaryCall` beside them."""

    query: Any
    key: Any
    cos: Any
    sin: Any
    facts: Mapping[str, Any]
    packed: bool

    def restored(self, array: Any) -> Any:
        """A result with the axes that query was given with."""
        return array[0] if self.packed else array


def check_rotation(
    query: Any, key: Any, cos: Any, sin: Any, rotary_dim: int | None, interleaved: bool, layout: str
) -> Rotation:
    """Check everything that turns heads; key may be None."""
    if layout not in ("BTHD", "BHTD"):
        raise invalid("layout", repr(layout), "'BTHD' or 'BHTD'")
    if not isinstance(interleaved, bool):
        raise wrong_type("interleaved", repr(interleaved), "a bool")
    heads_first = layout == "BHTD"
    check_compute("query", query)
    packed = query.ndim == 3
    if query.ndim not in (3, 4):
        raise invalid("query", f"shape {tuple(query.shape)} with {query.ndim} axes", "4 axes, or 3 without a batch")
    if key is not None:
        check_compute("key", key, ndim=query.ndim)
    if packed:
        query, key = query[None], None if key is None else key[None]
    batch, length, width = query.shape[0], query.shape[2 if heads_first else 1], query.shape[3]
    if key is not None and (key.shape[0], key.shape[2 if heads_first else 1], key.shape[3]) != (batch, length, width):
        raise invalid("key", f"shape {tuple(key.shape)}", f"batch {batch}, length {length} and head size {width} as in query")
    rotary_dim = _check_rotary_dim(rotary_dim, width)
    cos, sin = (_check_angles(name, value, batch, length, rotary_dim) for name, value in (("cos", cos), ("sin", sin)))
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        raise invalid("sin", ArraySpec.of(sin), f"{ArraySpec.of(cos)} as cos")
    facts = {"rotary_dim": rotary_dim, "interleaved": interleaved, "heads_first": heads_first}
    return Rotation(query, key, cos, sin, {"cos": ArraySpec.of(cos), "sin": ArraySpec.of(sin), **facts}, packed)


def check_pairs(cos: Any, sin: Any, rotary_dim: int, interleaved: bool) -> None:
    """Refuse tables per channel, if their numbers are known, whose channels are in the order of the other kind of pairs.

    A table that repeats its first half is for pairs (i, i + rotary_dim / 2), one that repeats each number for pairs (2i, 2i + 1).
    """
    for name, table in (("cos", cos), ("sin", sin)):
        per_channel = rotary_dim > 0 and rotary_dim % 2 == 0 and (0, *getattr(table, "shape", ()))[-1] == rotary_dim
        if not per_channel or table.size == 0 or isinstance(table, jax.core.Tracer):
            continue
        if not getattr(table, "is_fully_addressable", True):
            continue
        row = np.asarray(table.reshape(-1, rotary_dim)[-1])
        halves, neighbours = np.array_equal(row[: rotary_dim // 2], row[rotary_dim // 2 :]), np.array_equal(row[::2], row[1::2])
        if halves != neighbours and (halves if interleaved else neighbours):
            order, wanted = ("both halves alike", "neighbours") if halves else ("neighbours alike", "both halves")
            raise invalid(
                name,
                f"a table with {order}",
                f"{wanted} alike with interleaved={interleaved}",
                remedy=f"LlamaRotaryEmbedding(dim, interleaved={interleaved}) makes it, or pass one number per pair",
            )


def head_dims(call: RotaryCall, key: ArraySpec | None) -> dict[str, str]:
    """The dims of query, key, cos and sin.

    One key head beside several query heads would be on every device that has some of those, and its gradients counted there each
    time: heads are not split then.
    """
    axis = 1 if call.heads_first else 2
    lone = key is not None and key.shape[axis] == 1 < call.query.shape[axis]
    query, of_key = (
        f"b {heads} t d" if call.heads_first else f"b t {heads} d" for heads in (("hq", "hk") if lone else ("h", "h"))
    )
    return {"query": query, "key": of_key, "cos": "b? t w", "sin": "b? t w"}


def _check_rotary_dim(rotary_dim: int | None, width: int) -> int:
    rotary_dim = width if rotary_dim is None else rotary_dim
    if not isinstance(rotary_dim, int) or isinstance(rotary_dim, bool):
        raise wrong_type("rotary_dim", repr(rotary_dim), "an int or None")
    if rotary_dim % 2 or not 0 <= rotary_dim <= width:
        raise invalid("rotary_dim", rotary_dim, f"an even number of channels, at most {width} = head size")
    return rotary_dim


def _check_angles(name: str, value: Any, batch: int, length: int, rotary_dim: int) -> Any:
    if value is None:
        raise wrong_type(name, "None", "an array", remedy="LlamaRotaryEmbedding(dim)(position_ids) makes cos and sin")
    check_compute(name, value)
    shape = tuple(value.shape)
    if len(shape) not in (2, 3) or shape[-2] != length or (len(shape) == 3 and shape[0] not in (1, batch)):
        raise invalid(name, f"shape {shape}", f"[{length}, w], [1, {length}, w] or [{batch}, {length}, w]")
    if shape[-1] not in (rotary_dim, rotary_dim // 2):
        raise invalid(
            name,
            f"{shape[-1]} channels",
            f"rotary_dim = {rotary_dim}, or half of it",
            remedy="rotary_dim= says how many channels of a head are rotated",
        )
    return value if len(shape) == 3 else value[None]
