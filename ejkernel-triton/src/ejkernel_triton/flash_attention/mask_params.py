"""The static parameters of a call, as one `tl.constexpr`: kernels are specialised for them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

from ejkernel.operations.flash_attention import dropout
from ejkernel.operations.flash_attention.interface import FlashAttentionCall
from ejkernel_triton._numerics import DotPrecision, dot_precision
from ejkernel_triton.flash_attention.score_params import ONE, Program, ScoreParams, mask_program, score_params

LOG2_E = math.log2(math.e)
ABSENT = -1
MAX_SPLIT_WIDTH = 256
"""Largest head size for bf16x6."""

Lists = Callable[[int, int, bool], tuple[Any, int]]
"""`(block_q, block_k, by_key)` to the visited tiles, int32 `[1 or b, 1 or h, blocks, 4 + n]`, and the tokens of a listed block.

A row has the ends low, full_low, full_high, high, in tokens of the listed blocks, and then the list of up to n blocks. By queries,
a row is a block of `block_q` queries that lists blocks of keys; by keys, one of `block_k` keys that lists blocks of queries."""


@dataclasses.dataclass(frozen=True)
class MaskParams:
    """Mask and logit parameters. Logits are in units of `1 / unit` powers of two: weight = 2 ** (unit * (x - maximum)), where x
    is `query . key * factor + bias * bias_factor`, or with a soft cap `cap_factor * tanh` of half that number's natural
    logarithm.

    Attributes:
        heads, group: query heads, and query heads per key head.
        size, value_size: head sizes.
        bf16_terms, row, value_row: bfloat16 terms of a float32 operand (3), or 1 for unsplit operands; elements of a head's
            row.
        causal, prefix, left, right, chunk: positional mask; `ABSENT` or 0 if unused.
        offset: position of query 0, unless positions are given.
        query_positions, key_positions, query_segments, key_segments: 0 absent, 1 shared by the batch, 2 one row per batch
            member.
        bias, mask: `ABSENT`, or a bit set (1, 2, 4, 8) of the axes b, h, t, s along which the array is not broadcast.
        ranges: 0 if tile ranges follow from indices, else 1 or 2 as for positions: they are loaded.
        list_heads: heads that have lists of their own, 1 if they share them.
        list_block: tokens of the blocks that a tile range lists; 0 if it has no list, as its tiles follow each other.
        masked_first, masked_first_by_key: whether masked tiles may precede full tiles, in the loop over keys and in the loop
            over queries.
        has_full_tiles: whether some tiles may need no mask.
        nan_safe: whether non-finite values need the NaN-safe path: some entry may be masked, or operands are split.
        causal_by_index: causal, without positions and without a prefix.
        sinks, sinks_per_batch: number of sinks, and whether each batch member has its own.
        rounding: dtype that `query . key` is rounded to; "" for none.
        dropout, threshold, keep_scale: whether there is dropout, the hash value below which an entry is dropped, 1 / (1 -
            rate).
        fuse_lse: whether the accumulator of the QK MMA can start from minus the log-sum-exp: no bias, cap or rounding.
        capped: whether there is a soft cap.
        unit, factor, bias_factor, cap_factor: see above.
        scale: of `query . key`, for the gradients.
        normalize: whether the output is divided by the sum of its weights.
        precision: `input_precision` of `tl.dot` for unsplit operands.
        score, mask_program: programs of the score function and of the mask function, or None; one: that of the number 1.
        values, integers: how many numbers of each kind a row of the batch has of its own; 0 if it shares them.
        told_batch, told_head: whether functions are told batch and head by arrays; 2 if heads are told row by row.
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
    list_heads: int = 1
    list_block: int = 0
    score: ScoreParams | None = None
    mask_program: Program | None = None
    one: Program | None = None
    values: int = 0
    integers: int = 0
    told_batch: int = 0
    told_head: int = 0


def mask_params_of(call: FlashAttentionCall) -> MaskParams:
    """The parameters of a call that `supports` accepts."""
    arrays = (call.query_positions, call.key_positions, call.query_segments, call.key_segments)
    given = any(spec is not None for spec in arrays)
    elementwise = call.bias is not None or call.mask is not None
    functions = call.score_mod is not None or call.mask_mod is not None
    left, right = call.window or (None, None)
    farthest = call.query.shape[1] + call.key.shape[1] + abs(call.query_offset)
    if not given:  # clip to the largest distance, so that sums do not overflow
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
        ranges=max(*map(_storage, arrays), int(call.mask_mod is not None)),
        masked_first=call.mask_mod is not None or given or left is not None or bool(chunk),
        masked_first_by_key=call.mask_mod is not None or given or call.causal or right is not None or bool(chunk),
        has_full_tiles=call.mask is None and (call.bias is None or (call.logits_soft_cap is None and call.score_mod is None)),
        causal_by_index=call.causal and call.prefix is None and call.query_positions is None and call.key_positions is None,
        nan_safe=bf16_terms > 1
        or elementwise
        or functions
        or given
        or call.causal
        or call.window is not None
        or call.chunk_size is not None,
        sinks=0 if call.softmax_aux is None else call.softmax_aux.shape[2],
        sinks_per_batch=call.softmax_aux is not None and call.softmax_aux.shape[0] > 1,
        dropout=call.dropout_rate > 0,
        threshold=int(dropout.threshold(call.dropout_rate)),
        keep_scale=1 / (1 - call.dropout_rate),
        rounding=rounding,
        fuse_lse=not rounding
        and not functions
        and call.bias is None
        and call.logits_soft_cap is None
        and call.softmax_scale > 0,
        capped=call.logits_soft_cap is not None,
        unit=unit,
        factor=factor,
        bias_factor=bias_factor,
        cap_factor=cap_factor,
        scale=call.softmax_scale,
        normalize=call.normalize_output,
        precision=dot_precision(call.precision, call.query.dtype),
        score=score_params(call),
        mask_program=mask_program(call),
        one=ONE if call.score_mod is not None else None,
        values=_own(call.mod_values),
        integers=_own(call.mod_integers),
        told_batch=_storage(call.batch_index),
        told_head=_storage(call.head_index),
    )


def dot_mode(call: FlashAttentionCall) -> DotPrecision | Literal["bf16x6"]:
    """How operands are multiplied. bf16x6 emulates float32 wherever one TF32 MMA is not accurate enough and the split tiles
    fit.

    It exceeds the accuracy of "high", and is twice as fast as Triton's 3xTF32 on an H200.
    """
    precision = dot_precision(call.precision, call.query.dtype)
    width = max(call.query.shape[3], call.value.shape[3])
    rough = call.query.dtype != "float32" or precision == "tf32"
    return precision if rough or width > MAX_SPLIT_WIDTH else "bf16x6"


def _units(call: FlashAttentionCall) -> tuple[float, float, float, float]:
    """unit, factor, bias_factor, cap_factor. Without a bias and a cap, the scale is folded into the exponential. A score function
    gets the logits as they are."""
    if call.score_mod is not None:
        cap = call.logits_soft_cap
        to_double = 1.0 if cap is None else 2 * LOG2_E / cap
        return LOG2_E, call.softmax_scale * to_double, to_double, cap or 0.0
    if call.logits_soft_cap is not None:
        to_double = 2 * LOG2_E / call.logits_soft_cap
        return 1.0, call.softmax_scale * to_double, to_double, call.logits_soft_cap * LOG2_E
    if call.bias is None and call.softmax_scale > 0:
        return call.softmax_scale * LOG2_E, 1.0, 0.0, 0.0
    return 1.0, call.softmax_scale * LOG2_E, LOG2_E, 0.0


def _storage(spec: Any) -> int:
    if spec is None:
        return 0
    return 2 if spec.shape[0] > 1 else 1


def _own(spec: Any) -> int:
    return spec.shape[1] if spec is not None and spec.shape[0] > 1 else 0


def _axes(call: FlashAttentionCall, spec: Any) -> int:
    if spec is None:
        return ABSENT
    return sum(1 << axis for axis, size in enumerate(spec.shape) if size > 1)
