"""Cooperative row kernels: several programs share a row that is too wide for one. Each holds a split, so every array is read
once.

A program stores the partial sums of its split, arrives at the row's counter, and spins until all programs of the row have
arrived. Each then combines all partial sums, in the order of the splits, and writes its split. Programs need not be
co-resident: one that spins too long defers its split and exits, and the last one to arrive, for which all sums are there,
writes the deferred splits. One counter per row holds both the arrivals and the deferred splits, so a program either sees that
all have arrived or is seen to have deferred. In the interpreter, which runs programs one after the other, all but the last
defer.

A program with one row calls `arrive_and_wait`. A persistent program calls `arrive`, and `wait_or_defer` for the previous row,
for which it seldom waits; it writes splits deferred to it after its last row. No wait is unbounded, in whatever order programs
run.

The other functions save registers, and keep Triton's pipeliner from reordering: it hoists code that does not depend on loaded
values, and does not know that programs communicate through memory.
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
"""Polls of the counter before a program defers, about a microsecond each; the splits of a row arrive within a few."""

OPAQUE_ZERO = 0
"""Run-time value of the kernels' `zero` argument, which the compiler does not know (see `upcast`)."""


@triton.jit
def arrive_and_wait(p_counter, i_split, SPLITS: tl.constexpr, SPIN_LIMIT: tl.constexpr):
    """Release earlier stores and wait for the row's other programs. Returns whether all have arrived, else this split is
    deferred; a bit mask of the splits deferred to this program; and a zero for `upcast`."""
    COUNT: tl.constexpr = 255  # bits of the arrival count; the higher bits mark deferred splits
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
"""One thread polls the counter until all have arrived, at most `$2` times. A Triton loop would poll with all threads, and would
keep the loop around it from being pipelined."""
SPIN_WAIT = tl.constexpr(_SPIN_WAIT)


@triton.jit
def arrive(p_counter, SPLITS: tl.constexpr, SPIN_LIMIT: tl.constexpr):
    """Release earlier stores and arrive. Returns a bit mask of the splits deferred to this program; only the last to arrive
    gets any."""
    if SPIN_LIMIT > 1:
        # Like `tl.debug_barrier`, which would keep the loop around it from being pipelined.
        tl.inline_asm_elementwise("mov.u32 $0, $1; bar.sync 0;", "=r,r", [SPLITS], dtype=tl.int32, is_pure=False, pack=1)
    counter = tl.atomic_add(p_counter, 1, sem="release", scope="gpu") + 1
    return tl.where((counter & 255) == SPLITS, counter >> 8, 0)


@triton.jit
def wait_or_defer(p_counter, i_split, spin_limit, SPLITS: tl.constexpr, SPIN_LIMIT: tl.constexpr):
    """Wait at a counter at which this program has arrived. Returns whether all have arrived, else this split is deferred; and
    the spin limit of the next wait, halved after a wait in vain: the waits for a program that does not run yet add up to at
    most twice the limit.
    half as much after one that was in vain: programs of which one does not run yet wait no longer than twice in all.
    """
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
    """Whether all have arrived, with acquire semantics."""
    return (tl.atomic_add(p_counter, 0, sem="acquire", scope="gpu") & 255) == SPLITS


@triton.jit
def upcast(b_stored, zero):
    """Convert to float32 without sharing the result. `zero` is 0, which the compiler does not know: otherwise it would keep one
    float32 copy alive from use to use, in twice the registers of the stored values."""
    if b_stored.dtype.primitive_bitwidth == 16:
        b_bits = b_stored.to(tl.int16, bitcast=True) ^ zero.to(tl.int16)
        b_stored = b_bits.to(b_stored.dtype, bitcast=True)
    return b_stored.to(tl.float32)


@triton.jit
def force_load(b_stored, zero):
    """Convert pipelined values to float32 before the branch that uses them: Triton waits for them at their first use, issues
    the next loads there, and schedules branches last."""
    if b_stored.dtype.primitive_bitwidth == 32:
        b_stored = (b_stored.to(tl.int32, bitcast=True) ^ zero).to(tl.float32, bitcast=True)
    return b_stored.to(tl.float32)


@triton.jit
def pack_pairs(b_stored):
    """Pack 16-bit values in pairs: as loop-carried values each would take a 32-bit register."""
    if b_stored.dtype.primitive_bitwidth == 16:
        b_bits = b_stored.to(tl.uint16, bitcast=True)
        b_low, b_high = tl.split(tl.reshape(b_bits, [b_bits.numel // 2, 2]))
        b_stored = b_low.to(tl.uint32) | (b_high.to(tl.uint32) << 16)
    return b_stored


@triton.jit
def unpack_pairs(b_pairs, like):
    """The inverse of `pack_pairs`, with the dtype and shape of `like`."""
    if like.dtype.primitive_bitwidth == 16:
        b_low, b_high = (b_pairs & 0xFFFF).to(tl.uint16), (b_pairs >> 16).to(tl.uint16)
        b_pairs = tl.reshape(tl.join(b_low, b_high), like.shape).to(like.dtype, bitcast=True)
    return b_pairs


def spin_limit() -> int:
    """Polls before a program defers; 1 in the interpreter, where waiting is useless."""
    return 1 if interpreting() else SPIN_LIMIT


def splits_of(width: int, block: int) -> int:
    """Programs that share a row."""
    splits = -(-width // block)
    if splits > MAX_SPLITS:
        least = -(-width // MAX_SPLITS)
        raise ValueError(
            f"config: block {block} cuts a row of {width} columns into {splits} splits, at most {MAX_SPLITS} programs "
            f"cooperate; take a block of at least {least} columns, or cooperative=False"
        )
    return splits


def zero_counters(rows: int) -> Any:
    """Zeroed counters, an input that kernels update in place."""
    return jnp.zeros(rows, jnp.int32)
