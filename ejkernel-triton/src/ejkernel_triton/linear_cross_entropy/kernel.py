"""Some rows at a time: XLA's product makes their logits, a kernel reads each row and writes its gradient in its place, and two
more products form what x and the head get of it. Without gradients, the losses of `cross_entropy`, and their sum.

A row is read twice, the second time in reverse order, and mostly from the cache.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.cross_entropy.interface import IGNORED
from ejkernel.operations.linear_cross_entropy.interface import (
    LinearCrossEntropyCall,
    LinearCrossEntropyInputs,
    LinearCrossEntropyOutputs,
    per_row_inputs,
)
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._rows.config import warps_for
from ejkernel_triton._vocabulary import Head, chunk_count, clean, merged, over_chunks
from ejkernel_triton.cross_entropy import config as per_row, kernel as cross_entropy
from ejkernel_triton.cross_entropy.kernel import capped, row_statistics
from ejkernel_triton.linear_cross_entropy.config import Config, narrow


@triton.jit
def loss_and_gradient_kernel(
    p_x,
    p_targets,
    p_weights,
    p_loss,
    p_penalty,
    p_dx,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    CAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    IGNORED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A row's loss, and the gradient of its logits, which may be in their place."""
    i_row = tl.program_id(0)
    i_target = tl.load(p_targets + i_row)
    weight = tl.load(p_weights + i_row)
    p_row = p_x + i_row.to(tl.int64) * ENTRIES
    p_drow = p_dx + i_row.to(tl.int64) * ENTRIES
    COLUMNS: tl.constexpr = (ENTRIES + BLOCK - 1) // BLOCK
    if i_target == IGNORED:
        tl.store(p_loss + i_row, 0.0)
        tl.store(p_penalty + i_row, 0.0)
        for i_block in tl.range(0, ENTRIES, BLOCK):
            o_entry = i_block + tl.arange(0, BLOCK)  # [BLOCK]
            tl.store(p_drow + o_entry, tl.zeros([BLOCK], p_dx.dtype.element_ty), mask=o_entry < ENTRIES)
    else:
        m_here = (i_target >= 0) & (i_target < ENTRIES)
        logit = capped(tl.load(p_row + tl.where(m_here, i_target, 0)).to(tl.float32), CAP)
        log_total, shift, logit_sum = row_statistics(p_row, ENTRIES, BLOCK, CAP, 1.0, SMOOTHING > 0, STAGES)
        lse = log_total + shift
        loss = (1 - SMOOTHING) * (log_total + tl.where(m_here, shift - logit, shift))
        if SMOOTHING > 0:
            loss += SMOOTHING * (lse - logit_sum / ENTRIES)
        penalty = Z_LOSS * lse * lse
        tl.store(p_loss + i_row, (loss + penalty) * weight)
        tl.store(p_penalty + i_row, penalty * weight)
        d_loss = (1 - SMOOTHING) * weight
        d_probability = (1 + 2 * Z_LOSS * lse) * weight
        d_sum = -SMOOTHING / ENTRIES * weight
        subtracted = tl.where(lse == float("-inf"), 0.0, lse)
        tl.debug_barrier()  # every thread has read what others write below
        for i_back in tl.range(0, COLUMNS):
            o_entry = (COLUMNS - 1 - i_back) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
            m_entry = o_entry < ENTRIES
            b_logits = capped(tl.load(p_row + o_entry, mask=m_entry, other=0.0).to(tl.float32), CAP)
            b_dx = tl.exp(b_logits - subtracted) * d_probability + d_sum
            b_dx -= tl.where(o_entry == i_target, d_loss, 0.0)
            if CAP > 0:
                b_dx *= tl.where(b_logits == float("-inf"), 0.0, 1 - (b_logits / CAP) * (b_logits / CAP))
            tl.store(p_drow + o_entry, b_dx.to(p_dx.dtype.element_ty), mask=m_entry)


def _losses_and_gradients(
    call: LinearCrossEntropyCall, logits: Any, targets: Any, weights: Any, dtype: Any, config: Config
) -> list[Any]:
    """Weighted loss and penalty of each row, and the gradient of its logits in a dtype; in their place if that is theirs."""
    return call_kernel(
        loss_and_gradient_kernel,
        (logits, targets, weights),
        ((targets.shape, jnp.float32), (targets.shape, jnp.float32), (logits.shape, dtype)),
        grid=targets.size,
        input_output_aliases={0: 2} if logits.dtype == dtype else None,
        ENTRIES=call.vocabulary,
        BLOCK=config.block,
        CAP=call.logit_softcap or 0.0,
        SMOOTHING=call.label_smoothing,
        Z_LOSS=call.z_loss,
        IGNORED=IGNORED,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )


def forward(call: LinearCrossEntropyCall, inputs: LinearCrossEntropyInputs, config: Config) -> LinearCrossEntropyOutputs:
    targets = inputs.targets
    weights = jnp.ones(targets.shape, jnp.float32) if inputs.weights is None else inputs.weights
    weights = jax.lax.stop_gradient(jnp.where(targets == IGNORED, jnp.zeros((), jnp.float32), weights))
    if call.save_residuals:
        return _forward_with_gradients(call, inputs, weights, config)
    block = min(config.block, 2048)
    rows = max(1, config.rows // 2) if narrow(call) else config.rows  # as many bytes, of logits that are not rounded
    launch = per_row.Config(block, warps_for(block, 16), rows)
    loss, lse, logit_sum = cross_entropy.forward(call.per_row, per_row_inputs(inputs), launch)
    if call.label_smoothing:
        s = call.label_smoothing
        loss = (1 - s) * loss + s * (lse - logit_sum / call.vocabulary)
    penalty = call.z_loss * lse * lse
    return LinearCrossEntropyOutputs(*_totals(call, (loss + penalty) * weights, penalty * weights))


def _totals(call: LinearCrossEntropyCall, loss: Any, penalty: Any) -> tuple[Any, Any]:
    axes = tuple(range(1, loss.ndim))
    return jnp.sum(loss, axes), jax.lax.stop_gradient(jnp.sum(penalty, axes)) if call.z_loss else None


def _forward_with_gradients(
    call: LinearCrossEntropyCall, inputs: LinearCrossEntropyInputs, weights: Any, config: Config
) -> LinearCrossEntropyOutputs:
    batch, matrix = inputs.x.shape[0], inputs.head
    if not inputs.targets.size or not call.vocabulary:
        zeros = jnp.zeros((batch,), jnp.float32)
        of_each = (None if x is None else jnp.zeros((batch, *x.shape[1:]), x.dtype) for x in (matrix, inputs.head_bias))
        return LinearCrossEntropyOutputs(zeros, zeros if call.z_loss else None, jnp.zeros_like(inputs.x), *of_each)
    head = Head(matrix, inputs.head_bias, call.transpose_head, call.precision)
    chunks = chunk_count(batch, inputs.targets.size // batch, config.rows)
    of_sums = matrix.dtype if chunks == 1 else jnp.float32

    def work(arrays: Any) -> tuple[Any, Any]:
        x, targets, weights = arrays[0], arrays[1] + IGNORED, arrays[2]
        x, products = clean(x, targets != IGNORED), head.common(arrays[0])
        logits = head.logits(x, products if narrow(call) else jnp.float32)
        loss, penalty, d_logits = _losses_and_gradients(call, logits, targets, weights, products, config)
        return head.d_head(x, d_logits, False, of_sums), (loss, penalty, head.d_rows(d_logits, x.dtype))

    # Rows that fill up a chunk hold 0, which must mean ignored.
    arrays = (merged(inputs.x, 1), merged(inputs.targets, 0) - IGNORED, merged(weights, 0))
    (d_head, d_bias), (loss, penalty, d_x) = over_chunks(work, arrays, chunks)
    return LinearCrossEntropyOutputs(
        *_totals(call, loss, penalty),
        d_x.reshape(inputs.x.shape),
        d_head.astype(matrix.dtype),
        None if d_bias is None else d_bias.astype(inputs.head_bias.dtype),
    )


def backward(
    call: LinearCrossEntropyCall,
    inputs: LinearCrossEntropyInputs,
    outputs: LinearCrossEntropyOutputs,
    cotangents: LinearCrossEntropyOutputs,
    config: Config,
) -> LinearCrossEntropyInputs:
    def scaled(gradient: Any, array: Any) -> Any:
        if gradient is None:
            return None
        factors = cotangents.total.reshape(-1, *[1] * (gradient.ndim - 1))
        found = gradient.astype(jnp.float32) * factors
        return (jnp.sum(found, axis=0, keepdims=True) if array.shape[0] == 1 else found).astype(gradient.dtype)

    return LinearCrossEntropyInputs(
        scaled(outputs.d_x, inputs.x),
        None,
        scaled(outputs.d_head, inputs.head),
        scaled(outputs.d_head_bias, inputs.head_bias),
    )
