"""Forward reads each row once, with a running maximum and sum per lane; backward reads it once more and writes its gradient.

A head makes the logits of some rows at a time, in float32, in forward and again in backward.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false
import math
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.cross_entropy.interface import IGNORED, CrossEntropyCall, CrossEntropyInputs, CrossEntropyOutputs
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._vocabulary import Head, chunk_count, clean, merged, over_chunks
from ejkernel_triton.cross_entropy.config import Config


@triton.jit
def capped(b_x, CAP: tl.constexpr):
    """Logits after the soft cap, which leaves -inf as it is."""
    if CAP > 0:
        b_x = tl.where(b_x == float("-inf"), b_x, CAP * (2 * tl.sigmoid(2 * b_x / CAP) - 1))
    return b_x


@triton.jit
def row_statistics(
    p_row,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    CAP: tl.constexpr,
    SCALE: tl.constexpr,
    SUM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of a row's logits, times SCALE after the soft cap: `log(sum(exp(logits - shift)))`, the shift, which is finite, and their
    sum."""
    b_largest = tl.full([BLOCK], float("-inf"), tl.float32)
    b_total = tl.zeros([BLOCK], tl.float32)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i_block in tl.range(0, ENTRIES, BLOCK, num_stages=STAGES):
        o_entry = i_block + tl.arange(0, BLOCK)  # [BLOCK]
        m_entry = o_entry < ENTRIES
        b_x = tl.load(p_row + o_entry, mask=m_entry, other=float("-inf")).to(tl.float32)
        b_logits = capped(b_x, CAP)
        if SCALE != 1.0:
            b_logits *= SCALE
        b_logits = tl.where(m_entry, b_logits, float("-inf"))
        b_next = tl.maximum(b_largest, b_logits, propagate_nan=tl.PropagateNan.ALL)
        # Nothing may be subtracted from -inf but a finite number; its weight is 0.
        b_shift = tl.where(b_next == float("-inf"), 0.0, b_next)
        b_total = b_total * tl.exp(b_largest - b_shift) + tl.exp(b_logits - b_shift)
        b_largest = b_next
        if SUM:
            b_sum += tl.where(m_entry, b_logits, 0.0)
    largest = tl.max(b_largest, axis=0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    log_total = tl.log(tl.sum(b_total * tl.exp(b_largest - shift), axis=0))
    return log_total, shift, tl.sum(b_sum, axis=0)


@triton.jit
def cross_entropy_forward_kernel(
    p_x,
    p_targets,
    p_loss,
    p_lse,
    p_sum,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    CAP: tl.constexpr,
    SUM: tl.constexpr,
    IGNORED: tl.constexpr,
):
    i_row = tl.program_id(0)
    i_target = tl.load(p_targets + i_row)
    p_row = p_x + i_row.to(tl.int64) * ENTRIES
    if i_target == IGNORED:
        tl.store(p_loss + i_row, 0.0)
        tl.store(p_lse + i_row, 0.0)
        if SUM:
            tl.store(p_sum + i_row, 0.0)
    else:
        log_total, shift, logit_sum = row_statistics(p_row, ENTRIES, BLOCK, CAP, 1.0, SUM, 1)
        m_here = (i_target >= 0) & (i_target < ENTRIES)
        x = tl.load(p_row + tl.where(m_here, i_target, 0)).to(tl.float32)
        logit = capped(x, CAP)
        tl.store(p_loss + i_row, log_total + tl.where(m_here, shift - logit, shift))
        tl.store(p_lse + i_row, log_total + shift)
        if SUM:
            tl.store(p_sum + i_row, logit_sum)


@triton.jit
def cross_entropy_backward_kernel(
    p_x,
    p_targets,
    p_lse,
    p_dloss,
    p_dlse,
    p_dsum,
    p_dx,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    CAP: tl.constexpr,
    HAS_DLOSS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    HAS_DSUM: tl.constexpr,
    IGNORED: tl.constexpr,
):
    COLUMNS: tl.constexpr = (ENTRIES + BLOCK - 1) // BLOCK
    i_row = tl.program_id(0) // COLUMNS
    o_entry = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_entry = o_entry < ENTRIES
    i_target = tl.load(p_targets + i_row)
    o_row = i_row.to(tl.int64) * ENTRIES
    if i_target == IGNORED:
        tl.store(p_dx + o_row + o_entry, tl.zeros([BLOCK], p_dx.dtype.element_ty), mask=m_entry)
    else:
        d_loss = tl.load(p_dloss + i_row) if HAS_DLOSS else 0.0
        d_lse = tl.load(p_dlse + i_row) if HAS_DLSE else 0.0
        d_sum = tl.load(p_dsum + i_row) if HAS_DSUM else 0.0
        b_x = tl.load(p_x + o_row + o_entry, mask=m_entry, other=0.0).to(tl.float32)
        b_logits = capped(b_x, CAP)
        lse = tl.load(p_lse + i_row)
        b_dx = tl.exp(b_logits - tl.where(lse == float("-inf"), 0.0, lse)) * (d_loss + d_lse) + d_sum
        b_dx -= tl.where(o_entry == i_target, d_loss, 0.0)
        if CAP > 0:
            b_dx *= tl.where(b_logits == float("-inf"), 0.0, 1 - (b_logits / CAP) * (b_logits / CAP))
        tl.store(p_dx + o_row + o_entry, b_dx.to(p_dx.dtype.element_ty), mask=m_entry)


def _constants(call: CrossEntropyCall, config: Config) -> dict[str, Any]:
    return {
        "ENTRIES": call.vocabulary,
        "BLOCK": config.block,
        "CAP": call.logit_softcap or 0.0,
        "IGNORED": IGNORED,
        "num_warps": config.num_warps,
    }


def _statistics(call: CrossEntropyCall, logits: Any, targets: Any, config: Config) -> CrossEntropyOutputs:
    shape = targets.shape
    loss, lse, logit_sum = call_kernel(
        cross_entropy_forward_kernel,
        (logits, targets),
        ((shape, jnp.float32), (shape, jnp.float32), (shape if call.sum_logits else (1,), jnp.float32)),
        grid=math.prod(shape),
        SUM=call.sum_logits,
        **_constants(call, config),
    )
    return CrossEntropyOutputs(loss, lse, logit_sum if call.sum_logits else None)


def _d_logits(
    call: CrossEntropyCall, logits: Any, targets: Any, lse: Any, cotangents: CrossEntropyOutputs, dtype: Any, config: Config
) -> Any:
    given = [lse if value is None else value for value in cotangents]
    (d_logits,) = call_kernel(
        cross_entropy_backward_kernel,
        (logits, targets, lse, *given),
        ((logits.shape, dtype),),
        grid=targets.size * -(-call.vocabulary // config.block),
        HAS_DLOSS=cotangents.loss is not None,
        HAS_DLSE=cotangents.lse is not None,
        HAS_DSUM=cotangents.logit_sum is not None,
        **_constants(call, config),
    )
    return d_logits


def forward(call: CrossEntropyCall, inputs: CrossEntropyInputs, config: Config) -> CrossEntropyOutputs:
    shape = inputs.targets.shape
    if not math.prod(shape):
        zeros = jnp.zeros(shape, jnp.float32)
        return CrossEntropyOutputs(zeros, zeros, zeros if call.sum_logits else None)
    if inputs.head is None:
        return _statistics(call, inputs.x, inputs.targets, config)
    head = _head(call, inputs)

    def work(arrays: Any) -> tuple[None, CrossEntropyOutputs]:
        x, targets = arrays[0], arrays[1] + IGNORED
        logits = head.logits(clean(x, targets != IGNORED), jnp.float32)
        return None, _statistics(call, logits, targets, config)

    # Rows that fill up a chunk hold 0, which must mean ignored.
    _, found = over_chunks(work, (merged(inputs.x, 1), merged(inputs.targets, 0) - IGNORED), _chunks(inputs, config))
    return CrossEntropyOutputs(*(None if value is None else value.reshape(shape) for value in found))


def _head(call: CrossEntropyCall, inputs: CrossEntropyInputs) -> Head:
    return Head(inputs.head, inputs.head_bias, call.transpose_head, call.precision)


def _chunks(inputs: CrossEntropyInputs, config: Config) -> int:
    batch = inputs.targets.shape[0]
    return chunk_count(batch, inputs.targets.size // batch, config.rows)


def backward(
    call: CrossEntropyCall,
    inputs: CrossEntropyInputs,
    outputs: CrossEntropyOutputs,
    cotangents: CrossEntropyOutputs,
    config: Config,
) -> CrossEntropyInputs:
    if not inputs.targets.size or not call.vocabulary:
        zeros = (None if value is None else jnp.zeros_like(value) for value in (inputs.x, inputs.head, inputs.head_bias))
        x, *of_head = zeros
        return CrossEntropyInputs(x, None, *of_head)
    if inputs.head is None:
        return CrossEntropyInputs(
            _d_logits(call, inputs.x, inputs.targets, outputs.lse, cotangents, inputs.x.dtype, config), None
        )
    head, chunks = _head(call, inputs), _chunks(inputs, config)
    of_sums = inputs.head.dtype if chunks == 1 else jnp.float32

    def work(arrays: Any) -> tuple[Any, Any]:
        x, targets, lse, given = arrays[0], arrays[1] + IGNORED, *arrays[2:]
        x = clean(x, targets != IGNORED)
        d_logits = _d_logits(call, head.logits(x, jnp.float32), targets, lse, given, head.common(x), config)
        return head.d_head(x, d_logits, inputs.head.shape[0] == 1, of_sums), head.d_rows(d_logits, x.dtype)

    given = CrossEntropyOutputs(*(None if value is None else merged(value, 0) for value in cotangents))
    arrays = (merged(inputs.x, 1), merged(inputs.targets, 0) - IGNORED, merged(outputs.lse, 0), given)
    (matrix, bias), d_x = over_chunks(work, arrays, chunks)
    return CrossEntropyInputs(
        d_x.reshape(inputs.x.shape),
        None,
        matrix.astype(inputs.head.dtype),
        None if bias is None else _like(bias, inputs.head_bias),
    )


def _like(gradient: Any, array: Any) -> Any:
    """Summed over the members of the batch that share the array, in its dtype."""
    summed = gradient if gradient.shape == array.shape else jnp.sum(gradient, axis=0, keepdims=True)
    return summed.astype(array.dtype)
