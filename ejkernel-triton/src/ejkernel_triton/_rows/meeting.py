"""Programs that share rows too wide for one of them, in one launch that reads every array from memory once.

A row is cut into parts. A program sums up its part, leaves the sums in memory and counts itself as arrived; then it finishes the
part whose number is `lag` less than its own, which the second-level cache still holds. It waits only for programs with numbers
up to its own, none of which waits before it has arrived, so that all come to an end wherever programs begin in the order of
their numbers, as GPUs start them and the interpreter runs them. Sums are added up in the order of parts.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false
from typing import Any

import jax.numpy as jnp
import triton
import triton.language as tl


@triton.jit
def arrive(p_arrivals):
    """What this program stored before is seen by whoever waited for it."""
    tl.debug_barrier()
    tl.atomic_add(p_arrivals, 1, sem="release", scope="gpu")


@triton.jit
def wait_for(p_arrivals, wanted):
    """Until so many programs have arrived."""
    while tl.atomic_add(p_arrivals, 0, sem="acquire", scope="gpu") < wanted:
        pass


def arrivals_of(count: int) -> Any:
    """Counters of nobody, to be given to a kernel that changes them."""
    return jnp.zeros(count, jnp.int32)


def lag_of(lag: int, parts: int) -> int:
    """The config's, but the programs of a row come before the first one that waits for them."""
    return max(lag, parts - 1)
