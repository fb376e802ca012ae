"""Forward reads the logits of both sides twice: for the log-sum-exps, then for the terms, so that none cancels; backward once.

Heads make the logits of some rows at a time, in float32, in forward and again in backward.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportArgumentType=false
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.operations.kl_divergence.interface import DIRECTIONS, KlDivergenceCall, KlDivergenceInputs, KlDivergenceOutputs
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton._vocabulary import Head, chunk_count, clean, merged, over_chunks
from ejkernel_triton.cross_entropy.kernel import row_statistics
from ejkernel_triton.kl_divergence.config import Config


@triton.jit
def weighted(b_p, b_log, b_other):
    """`p (log - other)`, 0 where p is."""
    return b_p * tl.where(b_p > 0, b_log - b_other, 0.0)


@triton.jit
def terms(b_log_student, b_log_teacher, DIRECTION: tl.constexpr, BETA: tl.constexpr):
    """Of log-probabilities: the loss's terms, their derivatives by the student's, and the student's probabilities; DIRECTION is a
    place in `DIRECTIONS`."""
    b_student = tl.exp(b_log_student)
    b_teacher = tl.exp(b_log_teacher)
    if DIRECTION == 0:  # forward
        b_loss = weighted(b_teacher, b_log_teacher, b_log_student)
        b_slope = -b_teacher
    elif DIRECTION == 1:  # reverse
        b_loss = weighted(b_student, b_log_student, b_log_teacher)
        b_slope = b_loss + b_student
    else:
        b_mixture = BETA * b_teacher + (1 - BETA) * b_student
        b_mixed = tl.log(tl.where(b_mixture > 0, b_mixture, 1.0))
        b_slope = (1 - BETA) * weighted(b_student, b_log_student, b_mixed)
        b_loss = BETA * weighted(b_teacher, b_log_teacher, b_mixed) + b_slope
    return b_loss, b_slope, b_student


@triton.jit
def load_logits(p_row, o_entry, m_entry, SCALE: tl.constexpr):
    return tl.load(p_row + o_entry, mask=m_entry, other=float("-inf")).to(tl.float32) * SCALE


@triton.jit
def kl_divergence_forward_kernel(
    p_student,
    p_teacher,
    p_valid,
    p_loss,
    p_student_lse,
    p_teacher_lse,
    p_slope,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    DIRECTION: tl.constexpr,
    BETA: tl.constexpr,
    HAS_VALID: tl.constexpr,
):
    """One row."""
    i_row = tl.program_id(0)
    counts = tl.load(p_valid + i_row) != 0 if HAS_VALID else True
    loss = 0.0
    student_lse = 0.0
    teacher_lse = 0.0
    slope = 0.0
    if counts:
        p_student_row = p_student + i_row.to(tl.int64) * ENTRIES
        p_teacher_row = p_teacher + i_row.to(tl.int64) * ENTRIES
        student_log, student_shift, _ = row_statistics(p_student_row, ENTRIES, BLOCK, 0.0, SCALE, False, 1)
        teacher_log, teacher_shift, _ = row_statistics(p_teacher_row, ENTRIES, BLOCK, 0.0, SCALE, False, 1)
        b_loss = tl.zeros([BLOCK], tl.float32)
        b_slope = tl.zeros([BLOCK], tl.float32)
        COLUMNS: tl.constexpr = (ENTRIES + BLOCK - 1) // BLOCK
        for i_back in tl.range(0, COLUMNS):  # the last logits first, which are still cached
            o_entry = (COLUMNS - 1 - i_back) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
            m_entry = o_entry < ENTRIES
            b_log_student = load_logits(p_student_row, o_entry, m_entry, SCALE) - student_shift - student_log
            b_log_teacher = load_logits(p_teacher_row, o_entry, m_entry, SCALE) - teacher_shift - teacher_log
            b_loss_terms, b_slopes, _b_student = terms(b_log_student, b_log_teacher, DIRECTION, BETA)
            b_loss += b_loss_terms
            b_slope += b_slopes
        loss = tl.sum(b_loss, axis=0)
        slope = tl.sum(b_slope, axis=0)
        student_lse = student_log + student_shift
        teacher_lse = teacher_log + teacher_shift
    tl.store(p_loss + i_row, loss)
    tl.store(p_student_lse + i_row, student_lse)
    tl.store(p_teacher_lse + i_row, teacher_lse)
    tl.store(p_slope + i_row, slope)


@triton.jit
def kl_divergence_backward_kernel(
    p_student,
    p_teacher,
    p_valid,
    p_student_lse,
    p_teacher_lse,
    p_slope,
    p_dloss,
    p_dstudent,
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    DIRECTION: tl.constexpr,
    BETA: tl.constexpr,
    HAS_VALID: tl.constexpr,
):
    """Some entries of a row."""
    COLUMNS: tl.constexpr = (ENTRIES + BLOCK - 1) // BLOCK
    i_row = tl.program_id(0) // COLUMNS
    o_entry = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    m_entry = o_entry < ENTRIES
    o_row = i_row.to(tl.int64) * ENTRIES
    counts = tl.load(p_valid + i_row) != 0 if HAS_VALID else True
    b_dstudent = tl.zeros([BLOCK], tl.float32)
    if counts:
        b_log_student = load_logits(p_student + o_row, o_entry, m_entry, SCALE) - tl.load(p_student_lse + i_row)
        b_log_teacher = load_logits(p_teacher + o_row, o_entry, m_entry, SCALE) - tl.load(p_teacher_lse + i_row)
        _, b_slopes, b_probability = terms(b_log_student, b_log_teacher, DIRECTION, BETA)
        d_loss = tl.load(p_dloss + i_row) * SCALE
        b_dstudent = d_loss * (b_slopes - b_probability * tl.load(p_slope + i_row))
    tl.store(p_dstudent + o_row + o_entry, b_dstudent.to(p_dstudent.dtype.element_ty), mask=m_entry)


def _constants(call: KlDivergenceCall, valid: Any, config: Config) -> dict[str, Any]:
    return {
        "ENTRIES": call.vocabulary,
        "BLOCK": config.block,
        "SCALE": 1 / call.temperature,
        "DIRECTION": DIRECTIONS.index(call.direction),
        "BETA": call.beta or 0.0,
        "HAS_VALID": valid is not None,
        "num_warps": config.num_warps,
    }


def _heads(call: KlDivergenceCall, inputs: KlDivergenceInputs) -> tuple[Head | None, Head | None]:
    """Of the student and of the teacher."""

    def of(matrix: Any) -> Head | None:
        return None if matrix is None else Head(matrix, None, call.transpose_heads, call.precision)

    return of(inputs.student_head), of(inputs.teacher_head)


def _chunks(inputs: KlDivergenceInputs, rows: Any, config: Config) -> int:
    """Logits that are there already are worked on at once."""
    if inputs.student_head is None and inputs.teacher_head is None:
        return 1
    return chunk_count(rows.shape[0], rows.size // rows.shape[0], config.rows)


def _arrays(inputs: KlDivergenceInputs) -> tuple[Any, Any, Any]:
    """Rows of both sides, and which count: int32, as kernels read no bool."""
    valid = None if inputs.valid is None else merged(inputs.valid, 0).astype(jnp.int32)
    return merged(inputs.student, 1), merged(inputs.teacher, 1), valid


def _logits(x: Any, head: Head | None, valid: Any) -> tuple[Any, Any]:
    """The logits of some rows; and the rows, clean if they are hidden states."""
    if head is None:
        return x, x
    x = x if valid is None else clean(x, valid != 0)
    return head.logits(x, jnp.float32), x


def forward(call: KlDivergenceCall, inputs: KlDivergenceInputs, config: Config) -> KlDivergenceOutputs:
    shape = inputs.student.shape[:-1]
    rows = jnp.zeros(shape, jnp.float32)
    if not rows.size:
        return KlDivergenceOutputs(rows, *([rows] * 3 if call.save_residuals else []))
    heads = _heads(call, inputs)

    def work(arrays: Any) -> tuple[None, list[Any]]:
        *sides, valid = arrays
        (student, _), (teacher, _) = (_logits(x, head, valid) for x, head in zip(sides, heads, strict=True))
        of_rows = (student.shape[:2], jnp.float32)
        results = call_kernel(
            kl_divergence_forward_kernel,
            (student, teacher, student if valid is None else valid),
            (of_rows,) * 4,
            grid=student.shape[0] * student.shape[1],
            **_constants(call, valid, config),
        )
        return None, results

    _, found = over_chunks(work, _arrays(inputs), _chunks(inputs, rows, config))
    loss, *residuals = (value.reshape(shape) for value in found)
    return KlDivergenceOutputs(loss, *(residuals if call.save_residuals else []))


def backward(
    call: KlDivergenceCall,
    inputs: KlDivergenceInputs,
    outputs: KlDivergenceOutputs,
    cotangents: KlDivergenceOutputs,
    config: Config,
) -> KlDivergenceInputs:
    student_head = inputs.student_head
    if not outputs.loss.size or not call.vocabulary:
        of_head = None if student_head is None else jnp.zeros_like(student_head)
        return KlDivergenceInputs(jnp.zeros_like(inputs.student), None, of_head)
    heads, chunks = _heads(call, inputs), _chunks(inputs, outputs.loss, config)
    saved = [merged(x, 0) for x in (outputs.student_lse, outputs.teacher_lse, outputs.slope, cotangents.loss)]

    def work(arrays: Any) -> tuple[Any, Any]:
        (*sides, valid), saved = arrays
        (student, x), (teacher, _) = (_logits(x, head, valid) for x, head in zip(sides, heads, strict=True))
        (d_logits,) = call_kernel(
            kl_divergence_backward_kernel,
            (student, teacher, student if valid is None else valid, *saved),
            ((student.shape, x.dtype if heads[0] is None else heads[0].common(x)),),
            grid=student.shape[0] * student.shape[1] * -(-call.vocabulary // config.block),
            **_constants(call, valid, config),
        )
        if heads[0] is None:
            return None, d_logits
        of_sums = student_head.dtype if chunks == 1 else jnp.float32
        d_head, _ = heads[0].d_head(x, d_logits, student_head.shape[0] == 1, of_sums)
        return d_head, heads[0].d_rows(d_logits, x.dtype)

    d_head, d_student = over_chunks(work, (_arrays(inputs), saved), chunks)
    return KlDivergenceInputs(
        d_student.reshape(inputs.student.shape), None, None if d_head is None else d_head.astype(student_head.dtype)
    )
