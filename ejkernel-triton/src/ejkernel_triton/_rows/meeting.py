"""Programs that share a row too wide for one of them: each holds a part, so that every array passes memory once.

A program stores the sums of its part, counts itself as arrived, and waits until all of its row have; then each makes the result of
its part from everybody's sums, added up in the order of parts. Nobody has to be there at a time: who waited for long leaves, and
the last one to arrive, which finds everything that it needs, finishes the parts that were left. One word per row holds both
counts, so that a program either sees that all have arrived, or is seen to have left. In the interpreter, where one program runs
after the other, all but the last leave.

A program that has one row calls `meet`. One that walks over rows calls `arrive`, and `settle` for the row before, for which it
seldom waits; what was left to it, it finishes after its last row. Neither waits without end, in whatever order programs run.

The other functions here keep the values of such programs in few registers, and Triton's pipeliner from changing their order: it
moves what does not depend on loaded values before what does, and knows nothing of what programs tell each other through memory.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel_triton._interpret import interpreting
from ejkernel_triton._rows.config import MOST_PARTS

PATIENCE = 128
"""Looks at the word before a program leaves, about a microsecond each; parts of a row arrive within a few."""

UNKNOWN_ZERO = 0
"""Of kernels that take a `zero`, which the compiler does not know, to hold values as they are stored (`widened`)."""


@triton.jit
def meet(p_word, i_part, PARTS: tl.constexpr, PATIENCE: tl.constexpr):
    """What this program stored before will be seen by the others. Returns whether all have arrived, else this part is left; the
    parts that were left to this program, one bit each; and a zero for `widened`."""
    COUNT: tl.constexpr = 255  # the bits for arrivals; the next ones are for those that left
    tl.debug_barrier()
    word = tl.atomic_add(p_word, 1, sem="acq_rel", scope="gpu") + 1
    left = tl.where((word & COUNT) == PARTS, word >> 8, 0)
    looks = 0
    while ((word & COUNT) < PARTS) & (looks < PATIENCE):
        word = tl.atomic_add(p_word, 0, sem="acquire", scope="gpu")
        looks += 1
    if (word & COUNT) < PARTS:
        word = tl.atomic_add(p_word, 256 << i_part, sem="acq_rel", scope="gpu")
    return (word & COUNT) == PARTS, left, word >> 31


_AWAIT = """
{
    .reg .pred quit;
    .reg .b32 thread, word, looks;
    mov.u32 $0, 0;
    mov.u32 thread, %tid.x;
    setp.ne.u32 quit, thread, 0;
    @quit bra DONE;
    mov.u32 looks, $2;
LOOK:
    ld.relaxed.gpu.global.u32 word, [$1];
    and.b32 word, word, 255;
    setp.ge.u32 quit, word, $3;
    @quit bra DONE;
    nanosleep.u32 100;
    sub.u32 looks, looks, 1;
    setp.ne.u32 quit, looks, 0;
    @quit bra LOOK;
DONE:
}
"""
"""One thread looks at the word until all have arrived, `$2` times at most. A loop of Triton's own would keep a loop around it from
having loads in flight, and have the whole program look."""
AWAIT = tl.constexpr(_AWAIT)


@triton.jit
def arrive(p_word, PARTS: tl.constexpr, PATIENCE: tl.constexpr):
    """What this program stored before will be seen by the others. Returns the parts that were left to this program, one bit each,
    which is the last one if there are any."""
    if PATIENCE > 1:
        # As `tl.debug_barrier`, around which no loop would have loads in flight.
        tl.inline_asm_elementwise("mov.u32 $0, $1; bar.sync 0;", "=r,r", [PARTS], dtype=tl.int32, is_pure=False, pack=1)
    word = tl.atomic_add(p_word, 1, sem="release", scope="gpu") + 1
    return tl.where((word & 255) == PARTS, word >> 8, 0)


@triton.jit
def settle(p_word, i_part, patience, PARTS: tl.constexpr, PATIENCE: tl.constexpr):
    """Of a word at which this program has arrived: whether all have, else this part is left; and the patience for the next time,
    half as much after one that was in vain: programs of which one does not run yet wait no longer than twice in all."""
    word = tl.atomic_add(p_word, 0, sem="acquire", scope="gpu")
    if (word & 255) < PARTS:
        if PATIENCE > 1:
            tl.inline_asm_elementwise(AWAIT, "=r,l,r,r", [p_word, patience, PARTS], dtype=tl.int32, is_pure=False, pack=1)
        word = tl.atomic_add(p_word, 256 << i_part, sem="acq_rel", scope="gpu")
        if (word & 255) < PARTS:
            patience = tl.maximum(patience // 2, 1)
    return (word & 255) == PARTS, patience


@triton.jit
def complete_at(p_word, PARTS: tl.constexpr):
    """Whether all have arrived; if so, what they stored before is seen."""
    return (tl.atomic_add(p_word, 0, sem="acquire", scope="gpu") & 255) == PARTS


@triton.jit
def widened(b_stored, zero):
    """float32 of values of which others are made too, before or after. `zero` is 0, which the compiler does not know: without it,
    it would keep float32 from one use to the next, in twice the registers of what is stored."""
    if b_stored.dtype.primitive_bitwidth == 16:
        b_bits = b_stored.to(tl.int16, bitcast=True) ^ zero.to(tl.int16)
        b_stored = b_bits.to(b_stored.dtype, bitcast=True)
    return b_stored.to(tl.float32)


@triton.jit
def taken(b_stored, zero):
    """float32 of values that a loop has in flight, outside of the branch that works on them: Triton takes them into registers at
    their first use, then asks for the next ones, and leaves branches to the end."""
    if b_stored.dtype.primitive_bitwidth == 32:
        b_stored = (b_stored.to(tl.int32, bitcast=True) ^ zero).to(tl.float32, bitcast=True)
    return b_stored.to(tl.float32)


@triton.jit
def packed(b_stored):
    """Values of 16 bits in pairs: what one step of a loop hands to the next would take a register of 32 bits each."""
    if b_stored.dtype.primitive_bitwidth == 16:
        b_bits = b_stored.to(tl.uint16, bitcast=True)
        b_low, b_high = tl.split(tl.reshape(b_bits, [b_bits.numel // 2, 2]))
        b_stored = b_low.to(tl.uint32) | (b_high.to(tl.uint32) << 16)
    return b_stored


@triton.jit
def unpacked(b_packed, like):
    """What was `packed`, of the dtype and shape of `like`."""
    if like.dtype.primitive_bitwidth == 16:
        b_low, b_high = (b_packed & 0xFFFF).to(tl.uint16), (b_packed >> 16).to(tl.uint16)
        b_packed = tl.reshape(tl.join(b_low, b_high), like.shape).to(like.dtype, bitcast=True)
    return b_packed


def patience() -> int:
    """Looks at the word before a program leaves: waiting is of no use in the interpreter."""
    return 1 if interpreting() else PATIENCE


def parts_of(width: int, block: int) -> int:
    """Programs of a row."""
    parts = -(-width // block)
    if parts > MOST_PARTS:
        least = -(-width // MOST_PARTS)
        raise ValueError(
            f"config: block {block} cuts a row of {width} columns into {parts} parts, at most {MOST_PARTS} programs "
            f"meet; take a block of at least {least} columns, or meet=False"
        )
    return parts


def words_of(rows: int) -> Any:
    """Of rows where nobody has arrived, to be given to a kernel that changes them."""
    return jnp.zeros(rows, jnp.int32)
