"""Programs that share a row too wide for one of them: each holds a part, so that every array passes memory once.

A program stores the sums of its part, counts itself as arrived, and waits until all of its row have; then each makes the result of
its part from everybody's sums, added up in the order of parts. Nobody has to be there at a time: who waited for long leaves, and
the last one to arrive, which finds everything that it needs, finishes the parts that were left. One word per row holds both
counts, so that a program either sees that all have arrived, or is seen to have left. In the interpreter, where one program runs
after the other, all but the last leave.

A program that has one row calls `arrive_and_wait`. One that walks over rows calls `arrive`, and `wait_or_defer` for the row before, for which it
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
from ejkernel_triton._rows.config import MAX_SPLITS

SPIN_LIMIT = 128
"""Looks at the word before a program leaves, about a microsecond each; parts of a row arrive within a few."""

OPAQUE_ZERO = 0
"""Of kernels that take a `zero`, which the compiler does not know, to hold values as they are stored (`upcast`)."""


@triton.jit
def arrive_and_wait(p_counter, i_split, SPLITS: tl.constexpr, SPIN_LIMIT: tl.constexpr):
    """What this program stored before will be seen by the others. Returns whether all have arrived, else this part is left; the
    parts that were left to this program, one bit each; and a zero for `upcast`."""
    COUNT: tl.constexpr = 255  # the bits for arrivals; the next ones are for those that left
    tl.debug_barrier()
    counter = tl.atomic_add(p_counter, 1, sem="acq_rel", scope="gpu") + 1
    deferred = tl.where((counter & COUNT) == SPLITS, counter >> 8, 0)
    spins = 0
    while ((counter & COUNT) < SPLITS) & (spins < SPIN_LIMIT):
        counter = tl.atomic_add(p_counter, 0, sem="acquire", scope="gpu")
        spins += 1
    if (counter & COUNT) < SPLITS:
        counter = tl.atomic_add(p_counter, 256 << i_split, sem="acq_rel", scope="gpu")
    return (counter & COUNT) == SPLITS, deferred, counter >> 31


_SPIN_WAIT = """
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
SPIN_WAIT = tl.constexpr(_SPIN_WAIT)


@triton.jit
def arrive(p_counter, SPLITS: tl.constexpr, SPIN_LIMIT: tl.constexpr):
    """What this program stored before will be seen by the others. Returns the parts that were left to this program, one bit each,
    which is the last one if there are any."""
    if SPIN_LIMIT > 1:
        # As `tl.debug_barrier`, around which no loop would have loads in flight.
        tl.inline_asm_elementwise("mov.u32 $0, $1; bar.sync 0;", "=r,r", [SPLITS], dtype=tl.int32, is_pure=False, pack=1)
    counter = tl.atomic_add(p_counter, 1, sem="release", scope="gpu") + 1
    return tl.where((counter & 255) == SPLITS, counter >> 8, 0)


@triton.jit
def wait_or_defer(p_counter, i_split, spin_limit, SPLITS: tl.constexpr, SPIN_LIMIT: tl.constexpr):
    """Of a word at which this program has arrived: whether all have, else this part is left; and the patience for the next time,
    half as much after one that was in vain: programs of which one does not run yet wait no longer than twice in all."""
    counter = tl.atomic_add(p_counter, 0, sem="acquire", scope="gpu")
    if (counter & 255) < SPLITS:
        if SPIN_LIMIT > 1:
            tl.inline_asm_elementwise(
                SPIN_WAIT, "=r,l,r,r", [p_counter, spin_limit, SPLITS], dtype=tl.int32, is_pure=False, pack=1
            )
        counter = tl.atomic_add(p_counter, 256 << i_split, sem="acq_rel", scope="gpu")
        if (counter & 255) < SPLITS:
            spin_limit = tl.maximum(spin_limit // 2, 1)
    return (counter & 255) == SPLITS, spin_limit


@triton.jit
def all_arrived(p_counter, SPLITS: tl.constexpr):
    """Whether all have arrived; if so, what they stored before is seen."""
    return (tl.atomic_add(p_counter, 0, sem="acquire", scope="gpu") & 255) == SPLITS


@triton.jit
def upcast(b_stored, zero):
    """float32 of values of which others are made too, before or after. `zero` is 0, which the compiler does not know: without it,
    it would keep float32 from one use to the next, in twice the registers of what is stored."""
    if b_stored.dtype.primitive_bitwidth == 16:
        b_bits = b_stored.to(tl.int16, bitcast=True) ^ zero.to(tl.int16)
        b_stored = b_bits.to(b_stored.dtype, bitcast=True)
    return b_stored.to(tl.float32)


@triton.jit
def force_load(b_stored, zero):
    """float32 of values that a loop has in flight, outside of the branch that works on them: Triton takes them into registers at
    their first use, then asks for the next ones, and leaves branches to the end."""
    if b_stored.dtype.primitive_bitwidth == 32:
        b_stored = (b_stored.to(tl.int32, bitcast=True) ^ zero).to(tl.float32, bitcast=True)
    return b_stored.to(tl.float32)


@triton.jit
def pack_pairs(b_stored):
    """Values of 16 bits in pairs: what one step of a loop hands to the next would take a register of 32 bits each."""
    if b_stored.dtype.primitive_bitwidth == 16:
        b_bits = b_stored.to(tl.uint16, bitcast=True)
        b_low, b_high = tl.split(tl.reshape(b_bits, [b_bits.numel // 2, 2]))
        b_stored = b_low.to(tl.uint32) | (b_high.to(tl.uint32) << 16)
    return b_stored


@triton.jit
def unpack_pairs(b_pairs, like):
    """What was `pack_pairs`, of the dtype and shape of `like`."""
    if like.dtype.primitive_bitwidth == 16:
        b_low, b_high = (b_pairs & 0xFFFF).to(tl.uint16), (b_pairs >> 16).to(tl.uint16)
        b_pairs = tl.reshape(tl.join(b_low, b_high), like.shape).to(like.dtype, bitcast=True)
    return b_pairs


def spin_limit() -> int:
    """Looks at the word before a program leaves: waiting is of no use in the interpreter."""
    return 1 if interpreting() else SPIN_LIMIT


def splits_of(width: int, block: int) -> int:
    """Programs of a row."""
    splits = -(-width // block)
    if splits > MAX_SPLITS:
        least = -(-width // MAX_SPLITS)
        raise ValueError(
            f"config: block {block} cuts a row of {width} columns into {splits} parts, at most {MAX_SPLITS} programs "
            f"meet; take a block of at least {least} columns, or meet=False"
        )
    return splits


def zero_counters(rows: int) -> Any:
    """Of rows where nobody has arrived, to be given to a kernel that changes them."""
    return jnp.zeros(rows, jnp.int32)
