"""Contract of `rope`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from ejkernel._arrays import ArraySpec
from ejkernel.errors import invalid, wrong_type
from ejkernel.operation import Bound, Call, Cost, Operation
from ejkernel.operations._numbers import check_compute
from ejkernel.plugin import Phase


class RopeInputs(NamedTuple):
    """query and key `[b, t, h, d]`, or `[b, h, t, d]` with `heads_first`; heads may differ in number.

    cos, sin `[1 or b, t, w]`, both alike: w = `rotary_dim`, one number per channel, or w = `rotary_dim / 2`, one per pair.
    """

    query: Any
    key: Any = None
    cos: Any = None
    sin: Any = None


class RopeOutputs(NamedTuple):
    """query and key, rotated, in their own dtypes. There is no residual."""

    query: Any
    key: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeCall(Call):
    """Static facts.

    Attributes:
        rotary_dim: the first channels of each head, which are rotated; the others pass through.
        interleaved: pairs are channels (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
        heads_first: query and key are `[b, h, t, d]`.
    """

    query: ArraySpec
    key: ArraySpec | None = None
    cos: ArraySpec
    sin: ArraySpec
    rotary_dim: int
    interleaved: bool = False
    heads_first: bool = False

    @property
    def per_pair(self) -> bool:
        """Whether cos and sin hold one number per pair of channels instead of one per channel."""
        return 2 * self.cos.shape[-1] == self.rotary_dim


class Rope(Operation):
    """`out = x * cos + turn(x) * sin` on the first `rotary_dim` channels; `turn` maps each pair (a, b) to (-b, a).

    In float32 inside. With cos and sin of an angle per pair this rotates each pair by that angle.
    """

    name = "rope"
    Call = RopeCall
    Inputs = RopeInputs
    Outputs = RopeOutputs
    differentiable = ("query", "key", "cos", "sin")
    shardable = ("b", "t", "h")

    def canonicalise(
        self,
        query: Any,
        key: Any = None,
        cos: Any = None,
        sin: Any = None,
        *,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        layout: str = "BTHD",
    ) -> Bound:
        """Check; arrays stay as they are.

        Args:
            query: `[B,T,H,D]`, floating.
            key: `[B,T,K,D]` or None.
            cos: `[B,T,w]`, `[1,T,w]` or `[T,w]`, floating; w is `rotary_dim` (per channel) or `rotary_dim / 2` (per pair).
            sin: like cos.
            rotary_dim: even, at most D; None = D.
            interleaved: pairs are neighbours instead of halves.
            layout: "BTHD", or "BHTD" for query and key with heads first.
        """
        if layout not in ("BTHD", "BHTD"):
            raise invalid("layout", repr(layout), "'BTHD' or 'BHTD'")
        if not isinstance(interleaved, bool):
            raise wrong_type("interleaved", repr(interleaved), "a bool")
        heads_first = layout == "BHTD"
        check_compute("query", query, ndim=4)
        batch, length, width = query.shape[0], query.shape[2 if heads_first else 1], query.shape[3]
        if key is not None:
            check_compute("key", key, ndim=4)
            if (key.shape[0], key.shape[2 if heads_first else 1], key.shape[3]) != (batch, length, width):
                raise invalid(
                    "key", f"shape {tuple(key.shape)}", f"batch {batch}, length {length} and head size {width} as in query"
                )
        rotary_dim = _check_rotary_dim(rotary_dim, width)
        cos, sin = (_check_angles(name, value, batch, length, rotary_dim) for name, value in (("cos", cos), ("sin", sin)))
        if sin.shape != cos.shape or sin.dtype != cos.dtype:
            raise invalid("sin", ArraySpec.of(sin), f"{ArraySpec.of(cos)} as cos")
        call = RopeCall(
            query=ArraySpec.of(query),
            key=None if key is None else ArraySpec.of(key),
            cos=ArraySpec.of(cos),
            sin=ArraySpec.of(sin),
            rotary_dim=rotary_dim,
            interleaved=interleaved,
            heads_first=heads_first,
        )

        def finish(outputs: RopeOutputs) -> Any:
            return outputs.query if key is None else (outputs.query, outputs.key)

        return Bound(call, RopeInputs(query, key, cos, sin), finish)

    def dimensions(self, call: RopeCall) -> Mapping[str, str]:
        heads = "b h t d" if call.heads_first else "b t h d"
        return {"query": heads, "key": heads, "cos": "b? t w", "sin": "b? t w"}

    def output_specs(self, call: RopeCall) -> RopeOutputs:
        return RopeOutputs(call.query, call.key)

    def public(self, call: RopeCall) -> tuple[str, ...]:
        return ("query",) if call.key is None else ("query", "key")

    def cost(self, call: RopeCall, phase: Phase) -> Cost:
        rotated = [spec for spec in (call.query, call.key) if spec is not None]
        count = sum(spec.size // max(spec.shape[-1], 1) for spec in rotated) * call.rotary_dim
        array_bytes, angle_bytes = sum(spec.nbytes for spec in rotated), call.cos.nbytes + call.sin.nbytes
        if phase == "forward":
            return Cost(3 * count, 2 * array_bytes + angle_bytes)
        return Cost(7 * count, 3 * array_bytes + 2 * angle_bytes)


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


OPERATION = Rope()
