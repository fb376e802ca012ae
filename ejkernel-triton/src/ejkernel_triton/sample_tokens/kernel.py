"""One program per row, whose logits stay in the L2 cache while it passes over them.

The bits of floats are ordered as integers. Thresholds of top_k and top_p are integers too, found from the highest bit down: each
pass compares every logit with three candidates, which settles two bits. The last pass draws.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.sample_tokens.interface import NO_TOKEN, SampleTokensCall, SampleTokensInputs, SampleTokensOutputs
from ejkernel.operations.sample_tokens.noise import LARGEST
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.flash_attention.tiles import hash_bits
from ejkernel_triton.sample_tokens.config import Config

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
def _log_of_exponential(b_bits, LARGEST: tl.constexpr):
    """`log(-log(1 - u))` of uniform u; where 1 - u rounds, by `log(w) u / (1 - w)` with w = 1 - u as it is stored."""
    b_u = tl.minimum(b_bits.to(tl.float32) * 2.0**-32 + 2.0**-33, LARGEST)
    b_w = 1.0 - b_u
    b_rest = tl.where(b_w == 1.0, 1.0, 1.0 - b_w)
    return tl.log(tl.where(b_w == 1.0, b_u, -tl.log(b_w) * (b_u / b_rest)))


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
    p_tokens,
    p_logprobs,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
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
):
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + i_row * ENTRIES
    p_mask += i_row // rows * MASK_BATCH + i_row % rows * MASK_ROW
    given_temperature = tl.load(p_temperature + i_row)
    cold = given_temperature <= 0.0
    valid = given_temperature == given_temperature

    b_largest = tl.full([BLOCK], float("-inf"), tl.float32)
    b_nans = tl.zeros([BLOCK], tl.int32)
    for i_block in range(0, ENTRIES, BLOCK):
        b_x = _load(p_row, p_mask, i_block + tl.arange(0, BLOCK), ENTRIES, MASK, MASK_STRIDE)
        b_nans |= (b_x != b_x).to(tl.int32)
        b_largest = tl.maximum(b_largest, tl.where(b_x != b_x, float("-inf"), b_x))
    largest = tl.max(b_largest, axis=0)
    valid = valid & (tl.max(b_nans, axis=0) == 0) & (largest > float("-inf"))

    temperature = given_temperature
    b_floor = tl.zeros([1], tl.uint32)
    if TOP_K:
        top_k = tl.load(p_top_k + i_row)
        if (top_k >= 1) & (top_k < ENTRIES) & valid & (cold == 0):
            needed = top_k.to(tl.float32)
            b_floor = _largest_dropped(
                p_row, p_mask, largest, temperature, b_floor, needed, ENTRIES, BLOCK, MASK, MASK_STRIDE, TRAILING, False
            )  # fmt: skip
    if TOP_P:
        top_p = tl.load(p_top_p + i_row)
        valid = valid & (top_p == top_p)
        if (top_p < 1.0) & valid & (cold == 0):
            b_total = tl.zeros([BLOCK], tl.float32)
            for i_block in range(0, ENTRIES, BLOCK):
                b_x = _load(p_row, p_mask, i_block + tl.arange(0, BLOCK), ENTRIES, MASK, MASK_STRIDE)
                b_total += _weights(b_x, _ordered(b_x, TRAILING), largest, temperature, b_floor, True)
            share = top_p * tl.sum(b_total, axis=0)
            b_dropped = _largest_dropped(
                p_row, p_mask, largest, temperature, b_floor, share, ENTRIES, BLOCK, MASK, MASK_STRIDE, TRAILING, True
            )  # fmt: skip
            b_floor = tl.maximum(b_floor, b_dropped)
    least = 0.0
    if MIN_P:
        least = tl.load(p_min_p + i_row)
        valid = valid & (least == least)

    stream_0 = tl.load(p_streams + 2 * i_row)
    stream_1 = tl.load(p_streams + 2 * i_row + 1)
    b_best = tl.full([BLOCK], float("-inf"), tl.float32)
    b_token = tl.zeros([BLOCK], tl.int32)
    b_log_drawn = tl.zeros([BLOCK], tl.float32)
    b_total = tl.zeros([BLOCK], tl.float32)
    for i_block in range(0, ENTRIES, BLOCK):
        o_entry = i_block + tl.arange(0, BLOCK)
        b_x = _load(p_row, p_mask, o_entry, ENTRIES, MASK, MASK_STRIDE)
        b_log = _log_weights(b_x, largest, temperature)
        b_weight = tl.exp(b_log)
        m_kept = (_ordered(b_x, TRAILING) > b_floor) & (b_weight >= least) | (b_x == largest)
        b_bits = hash_bits(hash_bits(stream_0 ^ (o_entry.to(tl.uint32) * 0x9E3779B9)) ^ stream_1)
        b_score = tl.where(m_kept, b_log - tl.where(cold, 0.0, _log_of_exponential(b_bits, LARGEST)), float("-inf"))
        m_better = b_score > b_best
        b_best = tl.where(m_better, b_score, b_best)
        b_token = tl.where(m_better, o_entry, b_token)
        if LOGPROBS:
            b_log_drawn = tl.where(m_better, b_log, b_log_drawn)
            b_total += tl.where(m_kept, b_weight, 0.0)
    m_best = b_best == tl.max(b_best, axis=0)
    token = tl.min(tl.where(m_best, b_token, ENTRIES), axis=0)
    tl.store(p_tokens + i_row, tl.where(valid, token, NO_TOKEN))
    if LOGPROBS:
        log_drawn = tl.sum(tl.where(m_best & (b_token == token), b_log_drawn, 0.0), axis=0)
        logprob = tl.where(cold, 0.0, log_drawn - tl.log(tl.sum(b_total, axis=0)))
        tl.store(p_logprobs + i_row, tl.where(valid, logprob, float("nan")))


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
    tokens, logprobs = call_kernel(
        sample_tokens_kernel,
        (inputs.logits, jnp.broadcast_to(inputs.streams, (*shape, 2)), *given, mask, rows),
        ((shape, jnp.int32), (shape if call.return_logprobs else (1,), jnp.float32)),
        grid=batch * rows,
        num_warps=config.num_warps,
        ENTRIES=entries,
        BLOCK=config.block,
        TRAILING=_TRAILING[call.logits.dtype],
        TOP_K=top_k is not None,
        TOP_P=inputs.top_p is not None,
        MIN_P=inputs.min_p is not None,
        MASK=inputs.token_mask is not None,
        MASK_BATCH=sizes[1] * sizes[2] if sizes[0] > 1 else 0,
        MASK_ROW=sizes[2] if sizes[1] > 1 else 0,
        MASK_STRIDE=int(sizes[2] > 1),
        LOGPROBS=call.return_logprobs,
        LARGEST=LARGEST,
        NO_TOKEN=NO_TOKEN,
    )
    return SampleTokensOutputs(tokens, logprobs if call.return_logprobs else None)
