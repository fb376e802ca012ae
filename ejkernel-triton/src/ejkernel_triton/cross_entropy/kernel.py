"""Forward reads each row once, with a running maximum and sum per lane; backward reads it once more and writes its gradient."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
import math
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.cross_entropy.interface import IGNORED, CrossEntropyCall, CrossEntropyInputs, CrossEntropyOutputs
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.cross_entropy.config import Config


@triton.jit
def capped(b_x, CAP: tl.constexpr):
    """Logits after the soft cap, which leaves -inf as it is."""
    if CAP > 0:
        b_x = tl.where(b_x == float("-inf"), b_x, CAP * (2 * tl.sigmoid(2 * b_x / CAP) - 1))
    return b_x


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
        b_largest = tl.full([BLOCK], float("-inf"), tl.float32)
        b_total = tl.zeros([BLOCK], tl.float32)
        b_sum = tl.zeros([BLOCK], tl.float32)
        for i_block in range(0, ENTRIES, BLOCK):
            o_entry = i_block + tl.arange(0, BLOCK)  # [BLOCK]
            m_entry = o_entry < ENTRIES
            b_x = tl.load(p_row + o_entry, mask=m_entry, other=float("-inf")).to(tl.float32)
            b_logits = capped(b_x, CAP)
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
        m_here = (i_target >= 0) & (i_target < ENTRIES)
        x = tl.load(p_row + tl.where(m_here, i_target, 0)).to(tl.float32)
        logit = capped(x, CAP)
        tl.store(p_loss + i_row, log_total + tl.where(m_here, shift - logit, shift))
        tl.store(p_lse + i_row, log_total + shift)
        if SUM:
            tl.store(p_sum + i_row, tl.sum(b_sum, axis=0))


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
        "ENTRIES": call.x.shape[-1],
        "BLOCK": config.block,
        "CAP": call.logit_softcap or 0.0,
        "IGNORED": IGNORED,
        "num_warps": config.num_warps,
    }


def forward(call: CrossEntropyCall, inputs: CrossEntropyInputs, config: Config) -> CrossEntropyOutputs:
    shape = inputs.targets.shape
    if not math.prod(shape):
        zeros = jnp.zeros(shape, jnp.float32)
        return CrossEntropyOutputs(zeros, zeros, zeros if call.sum_logits else None)
    loss, lse, logit_sum = call_kernel(
        cross_entropy_forward_kernel,
        (inputs.x, inputs.targets),
        ((shape, jnp.float32), (shape, jnp.float32), (shape if call.sum_logits else (1,), jnp.float32)),
        grid=math.prod(shape),
        SUM=call.sum_logits,
        **_constants(call, config),
    )
    return CrossEntropyOutputs(loss, lse, logit_sum if call.sum_logits else None)


def backward(
    call: CrossEntropyCall,
    inputs: CrossEntropyInputs,
    outputs: CrossEntropyOutputs,
    cotangents: CrossEntropyOutputs,
    config: Config,
) -> CrossEntropyInputs:
    x = inputs.x
    if not x.size:
        return CrossEntropyInputs(jnp.zeros_like(x), None)
    given = [outputs.lse if value is None else value for value in cotangents]
    (d_x,) = call_kernel(
        cross_entropy_backward_kernel,
        (x, inputs.targets, outputs.lse, *given),
        ((x.shape, x.dtype),),
        grid=inputs.targets.size * -(-x.shape[-1] // config.block),
        HAS_DLOSS=cotangents.loss is not None,
        HAS_DLSE=cotangents.lse is not None,
        HAS_DSUM=cotangents.logit_sum is not None,
        **_constants(call, config),
    )
    return CrossEntropyInputs(d_x, None)
