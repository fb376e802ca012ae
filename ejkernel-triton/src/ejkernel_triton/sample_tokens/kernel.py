"""One program per row, whose logits stay in the L2 cache while it passes over them.

The bits of floats are ordered as integers. Thresholds of top_k and top_p are integers too, found from the highest bit down: each
pass compares every logit with three candidates, which settles two bits. The last pass draws.

Long rows are divided: a kernel before has a program for each part, which keeps the part's largest logits. If all that may be drawn
are among these, the row's program has them in registers, and passes over nothing.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false
# ruff: noqa: SIM102 - static and dynamic conditions stay apart
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.sample_tokens.interface import NO_TOKEN, SampleTokensCall, SampleTokensInputs, SampleTokensOutputs
from ejkernel.operations.sample_tokens.noise import LARGEST
from ejkernel_triton._blocks import next_power_of_2
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._rows.config import warps_for
from ejkernel_triton.flash_attention.tiles import hash_bits
from ejkernel_triton.sample_tokens.config import Config

_KEPT = 128
"""Largest logits of a part that are kept, and the largest top_k for which they are enough."""
_SLOTS = 256
"""Of a part: more than are kept, for logits that equal the last of them."""
_TRAILING = {"bfloat16": 16, "float16": 13, "float32": 0}
"""Bits that are alike in every float32 of this dtype."""


@triton.jit
def _load(p_row, p_mask, o_entry, ENTRIES: tl.constexpr, MASK: tl.constexpr, MASK_STRIDE: tl.constexpr):
    """Logits in float32, -inf where nothing may be drawn."""
    m_entry = o_entry < ENTRIES
    b_x = tl.load(p_row + o_entry, mask=m_entry, other=float("-inf")).to(tl.float32)
    if MASK:
        b_admitted = tl.load(p_mask + o_entry * MASK_STRIDE, mask=m_entry, other=0)
        b_x = tl.where(b_admitted != 0, b_x, float("-inf"))
    return b_x


@triton.jit
def _ordered(b_x, TRAILING: tl.constexpr):
    """uint32 in the order of the logits, both zeros alike."""
    b_bits = tl.where(b_x == 0.0, 0.0, b_x).to(tl.uint32, bitcast=True)
    return tl.where((b_bits >> 31) != 0, b_bits ^ 0xFFFFFFFF, b_bits | 0x80000000) >> TRAILING


@triton.jit
def _log_weights(b_x, largest, temperature):
    b_log = tl.where(b_x > float("-inf"), (b_x - largest) / temperature, float("-inf"))
    b_log = tl.where(temperature > 0.0, b_log, float("-inf"))
    return tl.where(b_x == largest, 0.0, b_log)


@triton.jit
def _weights(b_x, b_u, largest, temperature, floor, WEIGHTED: tl.constexpr):
    """Weights, or ones, of what is above the floor."""
    b_weight = tl.exp(_log_weights(b_x, largest, temperature)) if WEIGHTED else tl.full(b_x.shape, 1.0, tl.float32)
    return tl.where(b_u > floor, b_weight, 0.0)


@triton.jit
def _largest_dropped(
    p_row,
    p_mask,
    largest,
    temperature,
    floor,
    needed,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    MASK: tl.constexpr,
    MASK_STRIDE: tl.constexpr,
    TRAILING: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """The largest integer above which the weights sum to what is needed; 0 where nothing is dropped."""
    LEVELS: tl.constexpr = (33 - TRAILING) // 2
    b_low = tl.zeros([1], tl.uint32)
    b_step = tl.full([1], 4 ** (LEVELS - 1), tl.uint32)
    for _ in range(LEVELS):
        b_first = tl.zeros([BLOCK], tl.float32)
        b_second = tl.zeros([BLOCK], tl.float32)
        b_third = tl.zeros([BLOCK], tl.float32)
        for i_block in range(0, ENTRIES, BLOCK):
            b_x = _load(p_row, p_mask, i_block + tl.arange(0, BLOCK), ENTRIES, MASK, MASK_STRIDE)
            b_u = _ordered(b_x, TRAILING)
            b_weight = _weights(b_x, b_u, largest, temperature, floor, WEIGHTED)
            b_first += tl.where(b_u > b_low + b_step, b_weight, 0.0)
            b_second += tl.where(b_u > b_low + 2 * b_step, b_weight, 0.0)
            b_third += tl.where(b_u > b_low + 3 * b_step, b_weight, 0.0)
        reached = (tl.sum(b_first, axis=0) >= needed).to(tl.uint32)
        reached += (tl.sum(b_second, axis=0) >= needed).to(tl.uint32)
        reached += (tl.sum(b_third, axis=0) >= needed).to(tl.uint32)
        b_low += reached * b_step
        b_step = b_step >> 2
    return b_low


@triton.jit
def _largest_dropped_of(b_u, b_weight, needed, TRAILING: tl.constexpr):
    """As `_largest_dropped`, of weights that are in registers."""
    LEVELS: tl.constexpr = (33 - TRAILING) // 2
    b_low = tl.zeros([1], tl.uint32)
    b_step = tl.full([1], 4 ** (LEVELS - 1), tl.uint32)
    for _ in range(LEVELS):
        reached = (tl.sum(tl.where(b_u > b_low + b_step, b_weight, 0.0), axis=0) >= needed).to(tl.uint32)
        reached += (tl.sum(tl.where(b_u > b_low + 2 * b_step, b_weight, 0.0), axis=0) >= needed).to(tl.uint32)
        reached += (tl.sum(tl.where(b_u > b_low + 3 * b_step, b_weight, 0.0), axis=0) >= needed).to(tl.uint32)
        b_low += reached * b_step
        b_step = b_step >> 2
    return b_low


@triton.jit
def largest_of_parts_kernel(
    p_logits,
    p_temperature,
    p_top_k,
    p_mask,
    rows,
    p_values,
    p_tokens,
    p_largest,
    p_total,
    p_count,
    p_dropped,
    ENTRIES: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    TRAILING: tl.constexpr,
    TOP_K: tl.constexpr,
    MASK: tl.constexpr,
    MASK_BATCH: tl.constexpr,
    MASK_ROW: tl.constexpr,
    MASK_STRIDE: tl.constexpr,
    KEPT: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Of each part: its largest logits and their tokens, how many they are, the largest integer below theirs, its largest logit (or
    NaN if it has one), and the sum of its weights beside a weight of 1 for that."""
    i_row = tl.program_id(0).to(tl.int64) // PARTS
    i_part = tl.program_id(0).to(tl.int64)  # of all rows
    p_mask += i_row // rows * MASK_BATCH + i_row % rows * MASK_ROW
    o_entry = (tl.program_id(0) % PARTS) * PART + tl.arange(0, PART)
    b_x = _load(p_logits + i_row * ENTRIES, p_mask, o_entry, ENTRIES, MASK, MASK_STRIDE)
    nans = tl.max((b_x != b_x).to(tl.int32), axis=0)
    b_x = tl.where(b_x != b_x, float("-inf"), b_x)
    largest = tl.max(b_x, axis=0)
    tl.store(p_largest + i_part, tl.where(nans > 0, float("nan"), largest))
    temperature = tl.load(p_temperature + i_row)
    b_weight = tl.where(b_x > float("-inf"), tl.exp(_log_weights(b_x, largest, temperature)), 0.0)
    tl.store(p_total + i_part, tl.sum(b_weight, axis=0))
    needed = tl.full([], KEPT, tl.float32)
    if TOP_K:
        top_k = tl.load(p_top_k + i_row)
        needed = tl.where((top_k >= 1) & (top_k < KEPT), top_k.to(tl.float32), needed)
    b_u = _ordered(b_x, TRAILING)
    b_dropped = _largest_dropped_of(b_u, tl.where(b_x > float("-inf"), 1.0, 0.0), needed, TRAILING)
    tl.store(p_dropped + i_part + tl.arange(0, 1), b_dropped.to(tl.int32, bitcast=True))
    b_kept = ((b_u > b_dropped) & (b_x > float("-inf"))).to(tl.int32)
    tl.store(p_count + i_part, tl.sum(b_kept, axis=0))
    o_slot = tl.cumsum(b_kept, axis=0) - 1
    m_slot = (b_kept > 0) & (o_slot < SLOTS)
    tl.store(p_values + i_part * SLOTS + o_slot, b_x, mask=m_slot)
    tl.store(p_tokens + i_part * SLOTS + o_slot, o_entry, mask=m_slot)


@triton.jit
def _log_of_exponential(b_bits, LARGEST: tl.constexpr):
    """`log(-log(1 - u))` of uniform u; where 1 - u rounds, by `log(w) u / (1 - w)` with w = 1 - u as it is stored."""
    b_u = tl.minimum(b_bits.to(tl.float32) * 2.0**-32 + 2.0**-33, LARGEST)
    b_w = 1.0 - b_u
    b_rest = tl.where(b_w == 1.0, 1.0, 1.0 - b_w)
    return tl.log(tl.where(b_w == 1.0, b_u, -tl.log(b_w) * (b_u / b_rest)))


@triton.jit
def _scores(
    b_x, b_token, largest, temperature, cold, floor, least, stream_0, stream_1, TRAILING: tl.constexpr, LARGEST: tl.constexpr
):
    """Of tokens that are kept, of which the best is drawn; the logarithm of each weight; and the weight, 0 of what is dropped."""
    b_log = _log_weights(b_x, largest, temperature)
    b_weight = tl.exp(b_log)
    m_kept = (_ordered(b_x, TRAILING) > floor) & (b_weight >= least) | (b_x == largest)
    b_bits = hash_bits(hash_bits(stream_0 ^ (b_token.to(tl.uint32) * 0x9E3779B9)) ^ stream_1)
    b_score = tl.where(m_kept, b_log - tl.where(cold, 0.0, _log_of_exponential(b_bits, LARGEST)), float("-inf"))
    return b_score, b_log, tl.where(m_kept, b_weight, 0.0)


@triton.jit
def _store_best(
    p_token,
    p_logprob,
    b_best,
    b_token,
    b_log_drawn,
    b_total,
    cold,
    valid,
    ENTRIES: tl.constexpr,
    LOGPROBS: tl.constexpr,
    NO_TOKEN: tl.constexpr,
):
    m_best = b_best == tl.max(b_best, axis=0)
    token = tl.min(tl.where(m_best, b_token, ENTRIES), axis=0)
    tl.store(p_token, tl.where(valid, token, NO_TOKEN))
    if LOGPROBS:
        log_drawn = tl.sum(tl.where(m_best & (b_token == token), b_log_drawn, 0.0), axis=0)
        logprob = tl.where(cold, 0.0, log_drawn - tl.log(tl.sum(b_total, axis=0)))
        tl.store(p_logprob, tl.where(valid, logprob, float("nan")))


@triton.jit
def _largest_of_all(p_row, p_mask, ENTRIES: tl.constexpr, BLOCK: tl.constexpr, MASK: tl.constexpr, MASK_STRIDE: tl.constexpr):
    """The largest logit, and whether any is NaN."""
    b_largest = tl.full([BLOCK], float("-inf"), tl.float32)
    b_nans = tl.zeros([BLOCK], tl.int32)
    for i_block in range(0, ENTRIES, BLOCK):
        b_x = _load(p_row, p_mask, i_block + tl.arange(0, BLOCK), ENTRIES, MASK, MASK_STRIDE)
        b_nans |= (b_x != b_x).to(tl.int32)
        b_largest = tl.maximum(b_largest, tl.where(b_x != b_x, float("-inf"), b_x))
    return tl.max(b_largest, axis=0), tl.max(b_nans, axis=0)


@triton.jit
def _draw_from_all(
    p_row,
    p_mask,
    p_token,
    p_logprob,
    largest,
    temperature,
    needed,
    top_p,
    least,
    stream_0,
    stream_1,
    cold,
    valid,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    TRAILING: tl.constexpr,
    MASK: tl.constexpr,
    MASK_STRIDE: tl.constexpr,
    LOGPROBS: tl.constexpr,
    LARGEST: tl.constexpr,
    NO_TOKEN: tl.constexpr,
):
    """Passes over a row: some for each threshold, and one that draws. needed 0 and top_p 1: no threshold."""
    floor = tl.zeros([1], tl.uint32)
    if (needed > 0) & valid:
        floor = _largest_dropped(
            p_row, p_mask, largest, temperature, floor, needed, ENTRIES, BLOCK, MASK, MASK_STRIDE, TRAILING, False
        )  # fmt: skip
    if (top_p < 1.0) & valid:
        b_total = tl.zeros([BLOCK], tl.float32)
        for i_block in range(0, ENTRIES, BLOCK):
            b_x = _load(p_row, p_mask, i_block + tl.arange(0, BLOCK), ENTRIES, MASK, MASK_STRIDE)
            b_total += _weights(b_x, _ordered(b_x, TRAILING), largest, temperature, floor, True)
        share = top_p * tl.sum(b_total, axis=0)
        dropped = _largest_dropped(
            p_row, p_mask, largest, temperature, floor, share, ENTRIES, BLOCK, MASK, MASK_STRIDE, TRAILING, True
        )  # fmt: skip
        floor = tl.maximum(floor, dropped)
    b_best = tl.full([BLOCK], float("-inf"), tl.float32)
    b_token = tl.zeros([BLOCK], tl.int32)
    b_log_drawn = tl.zeros([BLOCK], tl.float32)
    b_kept = tl.zeros([BLOCK], tl.float32)
    for i_block in range(0, ENTRIES, BLOCK):
        o_entry = i_block + tl.arange(0, BLOCK)
        b_x = _load(p_row, p_mask, o_entry, ENTRIES, MASK, MASK_STRIDE)
        b_score, b_log, b_weight = _scores(
            b_x, o_entry, largest, temperature, cold, floor, least, stream_0, stream_1, TRAILING, LARGEST
        )  # fmt: skip
        m_better = b_score > b_best
        b_best = tl.where(m_better, b_score, b_best)
        b_token = tl.where(m_better, o_entry, b_token)
        if LOGPROBS:
            b_log_drawn = tl.where(m_better, b_log, b_log_drawn)
            b_kept += b_weight
    _store_best(p_token, p_logprob, b_best, b_token, b_log_drawn, b_kept, cold, valid, ENTRIES, LOGPROBS, NO_TOKEN)


@triton.jit
def sample_tokens_kernel(
    p_logits,
    p_streams,
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p,
    p_mask,
    rows,
    p_values,
    p_part_tokens,
    p_largest,
    p_total,
    p_count,
    p_dropped,
    p_tokens,
    p_logprobs,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    TRAILING: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    MASK: tl.constexpr,
    MASK_BATCH: tl.constexpr,
    MASK_ROW: tl.constexpr,
    MASK_STRIDE: tl.constexpr,
    LOGPROBS: tl.constexpr,
    LARGEST: tl.constexpr,
    NO_TOKEN: tl.constexpr,
    KEPT: tl.constexpr,
    SLOTS: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + i_row * ENTRIES
    p_mask += i_row // rows * MASK_BATCH + i_row % rows * MASK_ROW
    temperature = tl.load(p_temperature + i_row)
    cold = temperature <= 0.0
    valid = temperature == temperature
    needed = 0.0
    if TOP_K:
        top_k = tl.load(p_top_k + i_row)
        needed = tl.where((top_k >= 1) & (top_k < ENTRIES) & (cold == 0), top_k.to(tl.float32), 0.0)
    top_p = 1.0
    if TOP_P:
        top_p = tl.load(p_top_p + i_row)
        valid = valid & (top_p == top_p)
        top_p = tl.where(cold, 1.0, top_p)
    least = 0.0
    if MIN_P:
        least = tl.load(p_min_p + i_row)
        valid = valid & (least == least)
    stream_0 = tl.load(p_streams + 2 * i_row)
    stream_1 = tl.load(p_streams + 2 * i_row + 1)
    if PARTS == 0:
        largest, nans = _largest_of_all(p_row, p_mask, ENTRIES, BLOCK, MASK, MASK_STRIDE)
        valid = valid & (nans == 0) & (largest > float("-inf"))
        known = False
    else:
        o_part = tl.arange(0, PARTS_BLOCK)
        m_part = o_part < PARTS
        o_part += i_row * PARTS
        b_largest = tl.load(p_largest + o_part, mask=m_part, other=float("-inf"))
        nans = tl.max((b_largest != b_largest).to(tl.int32), axis=0)
        b_largest = tl.where(b_largest != b_largest, float("-inf"), b_largest)
        largest = tl.max(b_largest, axis=0)
        valid = valid & (nans == 0) & (largest > float("-inf"))
        enough = tl.max(tl.load(p_count + o_part, mask=m_part, other=0), axis=0) <= SLOTS

        o_slot = tl.arange(0, PARTS_BLOCK * SLOTS)
        m_slot = o_slot // SLOTS < PARTS
        i_part = i_row * PARTS + o_slot // SLOTS
        m_slot = m_slot & (o_slot % SLOTS < tl.load(p_count + i_part, mask=m_slot, other=0))
        b_x = tl.load(p_values + i_row * PARTS * SLOTS + o_slot, mask=m_slot, other=float("-inf"))
        b_token = tl.load(p_part_tokens + i_row * PARTS * SLOTS + o_slot, mask=m_slot, other=ENTRIES)
        b_u = _ordered(b_x, TRAILING)
        few = (needed > 0) & (needed <= KEPT)
        known = (cold | few) & enough
        floor = tl.zeros([1], tl.uint32)
        if few & valid & enough:
            floor = _largest_dropped_of(b_u, tl.where(m_slot, 1.0, 0.0), needed, TRAILING)
        if TOP_P:
            if (top_p < 1.0) & (few | (needed == 0)) & valid & enough:
                b_weight = tl.where(m_slot, _weights(b_x, b_u, largest, temperature, floor, True), 0.0)
                total = tl.sum(b_weight, axis=0)
                if needed == 0:  # what is not here has weights too
                    b_total = tl.load(p_total + o_part, mask=m_part, other=0.0)
                    total = tl.sum(tl.exp(_log_weights(b_largest, largest, temperature)) * b_total, axis=0)
                # above the largest that any part has dropped, all are here
                b_dropped = tl.load(p_dropped + o_part, mask=m_part, other=0).to(tl.uint32, bitcast=True)
                here = tl.sum(tl.where(b_u > tl.max(b_dropped, axis=0), b_weight, 0.0), axis=0)
                known = known | (here >= top_p * total)
                if known:
                    floor = tl.maximum(floor, _largest_dropped_of(b_u, b_weight, top_p * total, TRAILING))
        if known:
            b_score, b_log, b_weight = _scores(
                b_x, b_token, largest, temperature, cold, floor, least, stream_0, stream_1, TRAILING, LARGEST
            )  # fmt: skip
            b_score = tl.where(m_slot, b_score, float("-inf"))
            b_weight = tl.where(m_slot, b_weight, 0.0)
            _store_best(
                p_tokens + i_row, p_logprobs + i_row, b_score, b_token, b_log, b_weight, cold, valid, ENTRIES, LOGPROBS, NO_TOKEN
            )  # fmt: skip
    if not known:
        _draw_from_all(
            p_row, p_mask, p_tokens + i_row, p_logprobs + i_row, largest, temperature, needed, top_p, least, stream_0, stream_1,
            cold, valid, ENTRIES, BLOCK, TRAILING, MASK, MASK_STRIDE, LOGPROBS, LARGEST, NO_TOKEN,
        )  # fmt: skip


def forward(call: SampleTokensCall, inputs: SampleTokensInputs, config: Config) -> SampleTokensOutputs:
    batch, rows, entries = call.logits.shape
    shape = (batch, rows)
    if not batch * rows:
        return SampleTokensOutputs(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32) if call.return_logprobs else None)
    top_k = inputs.top_k if call.static_top_k is None else jnp.full((1, 1), call.static_top_k, jnp.int32)
    settings = (inputs.temperature, top_k, inputs.top_p, inputs.min_p)
    given = [inputs.temperature if one is None else jnp.broadcast_to(one, shape) for one in settings]
    mask = inputs.logits if inputs.token_mask is None else inputs.token_mask
    sizes = (1, 1, 1) if inputs.token_mask is None else inputs.token_mask.shape
    parts = -(-entries // config.part) if config.part else 0
    shared = {
        "ENTRIES": entries,
        "PARTS": parts,
        "TRAILING": _TRAILING[call.logits.dtype],
        "TOP_K": top_k is not None,
        "MASK": inputs.token_mask is not None,
        "MASK_BATCH": sizes[1] * sizes[2] if sizes[0] > 1 else 0,
        "MASK_ROW": sizes[2] if sizes[1] > 1 else 0,
        "MASK_STRIDE": int(sizes[2] > 1),
        "KEPT": _KEPT,
        "SLOTS": _SLOTS,
    }
    largest: list[Any] = [inputs.logits] * 6
    if parts:
        slots, of_parts = (batch * rows * parts * _SLOTS,), (batch * rows * parts,)
        largest = call_kernel(
            largest_of_parts_kernel,
            (inputs.logits, given[0], given[1], mask, rows),
            (
                (slots, jnp.float32),
                (slots, jnp.int32),
                (of_parts, jnp.float32),
                (of_parts, jnp.float32),
                (of_parts, jnp.int32),
                (of_parts, jnp.int32),
            ),
            grid=batch * rows * parts,
            num_warps=warps_for(config.part, 32),
            PART=config.part,
            **shared,
        )
    tokens, logprobs = call_kernel(
        sample_tokens_kernel,
        (inputs.logits, jnp.broadcast_to(inputs.streams, (*shape, 2)), *given, mask, rows, *largest),
        ((shape, jnp.int32), (shape if call.return_logprobs else (1,), jnp.float32)),
        grid=batch * rows,
        num_warps=config.num_warps,
        BLOCK=config.block,
        PARTS_BLOCK=next_power_of_2(max(parts, 1)),
        TOP_P=inputs.top_p is not None,
        MIN_P=inputs.min_p is not None,
        LOGPROBS=call.return_logprobs,
        LARGEST=LARGEST,
        NO_TOKEN=NO_TOKEN,
        **shared,
    )
    return SampleTokensOutputs(tokens, logprobs if call.return_logprobs else None)
