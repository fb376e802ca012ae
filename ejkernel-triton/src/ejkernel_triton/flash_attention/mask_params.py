"""What a kernel is compiled for: the static facts of a call, as one constant."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from ejkernel.operations.flash_attention import dropout
from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel_triton._numerics import DotPrecision, dot_precision

LOG2_E = math.log2(math.e)
ABSENT = -1
MAX_SPLIT_WIDTH = 256
"""Of a head whose float32 is multiplied in parts."""


@dataclasses.dataclass(frozen=True)
class MaskParams:
    """Logits are kept in units of `1 / unit` powers of two: weight = 2 ** (unit * (x - maximum)), where x is made from
    `query . key` as `raw * factor + bias * bias_factor`, or `cap_factor * tanh` of half its natural logarithm if capped.

    Attributes:
        heads, group: query heads, and query heads per key head.
        size, value_size: of a head.
        parts, row, value_row: bfloat16 arrays that sum to one of float32, or 1 for operands as they are; elements of a head's row.
        causal, prefix, left, right, chunk: rules of position; `ABSENT` or 0 where there is none.
        offset: position of query 0 without an array of positions.
        query_positions, key_positions, query_segments, key_segments: 0 absent, 1 shared over the batch, 2 one row per batch.
        bias, mask: `ABSENT`, or a sum of 1, 2, 4, 8 for the axes b, h, t, s along which the array is not broadcast.
        ranges: 0 if the tiles to visit follow from indices, else 1 or 2 as above.
        edges_first, edges_first_by_key: masked tiles may come before whole ones, among the keys of a block of queries, and among
            the queries of a block of keys.
        whole: some tiles may need no mask.
        careful: some entry can be hidden, so that what is not finite there must be kept out of the products; or parts meet it.
        simple: causal by indices and without a prefix.
        sinks: their number, and whether they are per batch.
        rounding: dtype that `query . key` is rounded to, "" for none.
        plain: logits are nothing but products, so that a row's statistic can be where their sum starts.
    """

    heads: int
    group: int
    size: int
    value_size: int
    bf16_terms: int
    row: int
    value_row: int
    causal: bool
    prefix: int
    left: int
    right: int
    chunk: int
    offset: int
    query_positions: int
    key_positions: int
    query_segments: int
    key_segments: int
    bias: int
    mask: int
    ranges: int
    masked_first: bool
    masked_first_by_key: bool
    has_full_tiles: bool
    nan_safe: bool
    causal_by_index: bool
    sinks: int
    sinks_per_batch: bool
    dropout: bool
    threshold: int
    keep_scale: float
    rounding: str
    fuse_lse: bool
    capped: bool
    unit: float
    factor: float
    bias_factor: float
    cap_factor: float
    scale: float
    normalize: bool
    precision: str


def mask_params_of(call: FlashAttentionCall) -> MaskParams:
    """The rules of a call that `supports` admits."""
    arrays = (call.query_positions, call.key_positions, call.query_segments, call.key_segments)
    given = any(spec is not None for spec in arrays)
    elementwise = call.bias is not None or call.mask is not None
    left, right = call.window or (None, None)
    farthest = call.query.shape[1] + call.key.shape[1] + abs(call.query_offset)
    if not given:  # beyond the farthest position a rule has no effect, and sums of smaller numbers do not overflow
        left, right = (None if side is None else min(side, farthest) for side in (left, right))
    chunk = call.chunk_size or 0
    unit, factor, bias_factor, cap_factor = _units(call)
    bf16_terms = 3 if dot_mode(call) == "bf16x6" else 1
    rounding = call.logits_dtype if call.logits_dtype in ("bfloat16", "float16") else ""
    return MaskParams(
        heads=call.query.shape[2],
        group=call.query.shape[2] // call.key.shape[2],
        size=call.query.shape[3],
        value_size=call.value.shape[3],
        bf16_terms=bf16_terms,
        row=bf16_terms * call.query.shape[3],
        value_row=bf16_terms * call.value.shape[3],
        causal=call.causal,
        prefix=call.prefix or 0,
        left=ABSENT if left is None else left,
        right=ABSENT if right is None else right,
        chunk=chunk if given else min(chunk, farthest),
        offset=call.query_offset,
        query_positions=_storage(call.query_positions),
        key_positions=_storage(call.key_positions),
        query_segments=_storage(call.query_segments),
        key_segments=_storage(call.key_segments),
        bias=_axes(call, call.bias),
        mask=_axes(call, call.mask),
        ranges=max(map(_storage, arrays)),
        masked_first=given or left is not None or bool(chunk),
        masked_first_by_key=given or call.causal or right is not None or bool(chunk),
        has_full_tiles=call.mask is None and (call.bias is None or call.soft_cap is None),
        causal_by_index=call.causal and call.prefix is None and call.query_positions is None and call.key_positions is None,
        nan_safe=bf16_terms > 1
        or elementwise
        or given
        or call.causal
        or call.window is not None
        or call.chunk_size is not None,
        sinks=0 if call.sinks is None else call.sinks.shape[2],
        sinks_per_batch=call.sinks is not None and call.sinks.shape[0] > 1,
        dropout=call.dropout_rate > 0,
        threshold=int(dropout.threshold(call.dropout_rate)),
        keep_scale=1 / (1 - call.dropout_rate),
        rounding=rounding,
        fuse_lse=not rounding and call.bias is None and call.soft_cap is None and call.scale > 0,
        capped=call.soft_cap is not None,
        unit=unit,
        factor=factor,
        bias_factor=bias_factor,
        cap_factor=cap_factor,
        scale=call.scale,
        normalize=call.normalize_output,
        precision=dot_precision(call.precision, call.query.dtype),
    )


def dot_mode(call: FlashAttentionCall) -> DotPrecision | Literal["bf16x6"]:
    """How operands are multiplied: float32 that one product of TF32 is too rough for in parts, for heads whose tiles in parts fit.

    That is more than "high" asks for, and faster: 13.7 ms on an H200 where Triton's three products of TF32 took 31 ms.
    """
    precision = dot_precision(call.precision, call.query.dtype)
    width = max(call.query.shape[3], call.value.shape[3])
    rough = call.query.dtype != "float32" or precision == "tf32"
    return precision if rough or width > MAX_SPLIT_WIDTH else "bf16x6"


def _units(call: FlashAttentionCall) -> tuple[float, float, float, float]:
    """unit, factor, bias_factor, cap_factor. With nothing to add or cap, the scale is folded into the exponential."""
    if call.soft_cap is not None:
        to_double = 2 * LOG2_E / call.soft_cap
        return 1.0, call.scale * to_double, to_double, call.soft_cap * LOG2_E
    if call.bias is None and call.scale > 0:
        return call.scale * LOG2_E, 1.0, 0.0, 0.0
    return 1.0, call.scale * LOG2_E, LOG2_E, 0.0


def _storage(spec: Any) -> int:
    if spec is None:
        return 0
    return 2 if spec.shape[0] > 1 else 1


def _axes(call: FlashAttentionCall, spec: Any) -> int:
    if spec is None:
        return ABSENT
    return sum(1 << axis for axis, size in enumerate(spec.shape) if size > 1)
