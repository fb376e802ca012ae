"""Performance knobs of the operations over rows.

A thread takes up to four packs of 16 bytes of a row. Its block copies rows ahead of the one in work into shared memory, so that
memory stays busy while threads wait for each other; or it reads a few rows straight into registers and ends, then some operations
have kernels with eight packs per thread. Rows wider than the threads of a block can take are shared by a cluster of blocks from
compute capability 9.0 on, in either way; those that do not fit are read more than once.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from ejkernel.call import ArraySpec
from ejkernel.operations.add_rms_norm.interface import AddRmsNormCall
from ejkernel.operations.common.rows.interface import NormCall
from ejkernel.plugin import ConfigSpace, Target

THREADS = tuple(1 << power for power in range(10))
CLUSTERS = (2, 4, 8, 16)
CLUSTERS_SINCE = (9, 0)
PACKS = 4
WARP = 32
MOST = PACKS * THREADS[-1]
"""Packs of a row that one block takes."""
_STAGES = {1: 4, 2: 3, 3: 2}
"""By the arrays that are read: about 100 KB on their way to a processor with the threads that fit there."""
_CLUSTER_STAGES = 3
MANY_PACKS = 8
"""Of a row per thread at most, where nothing else of it is held in registers: two blocks of 512 threads with 64 registers on a
processor."""
MOST_DIRECT = 1024
"""Packs of a row that goes straight to registers; norms of one array take twice as many, two blocks of 512 threads with 64
registers on a processor."""
_DIRECT_CLUSTER_THREADS = 256
_MOST_IN_CLUSTERS = 4 * MANY_PACKS * _DIRECT_CLUSTER_THREADS
"""Packs of the widest rows of norms in registers of clusters; beyond that, shared memory was 1.02 times as fast on an H200."""
_SPARE = 64
"""Packs that two threads each take before there are enough threads for four."""
_PROCESSORS = 160
"""Of a device, at most; the library launches no more blocks than run at once."""


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    threads: wished for of a block for each row, a power of two up to 512; the library takes more when a row needs them, and fewer
        when four packs per thread (eight straight to registers, where an operation has so many) or the packs of the row leave some
        without.
    cluster: blocks that share a row, a power of two up to 16. Above 1, `threads` has no effect: each has four packs, or eight
        straight to registers.
    stages: rows of a block in shared memory, 1 to 8; fewer where that is too small. A cluster has 2 at least, one of them for a row
        whose numbers its blocks are still telling each other. 0: none; a thread asks for up to four packs, or eight, of one row or
        of several, and its block ends with them; what a warp can have whole takes as many threads as the library is compiled for.
        As the least there is where rows do not start on 16 bytes, and for clusters unless `direct_clusters` lists them. Rows of
        norms of one array that do, and that fit one block, are always so.
    """

    threads: int
    cluster: int = 1
    stages: int = 4


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Attributes:
    threads, cluster, stages: as in forward, but at least one stage.
    parts: blocks or clusters that share the rows under one parameter, at most; each writes a partial sum of the parameter's
        gradient. No more are launched than the device runs at once.
    """

    threads: int
    parts: int
    cluster: int = 1
    stages: int = 3


def packs_of(x: ArraySpec) -> int:
    """Accesses that cover one row: 16 bytes each when rows start on 16 bytes, else one element each."""
    width, itemsize = x.shape[-1], 4 if x.dtype == "float32" else 2
    return -(-width * itemsize // 16) if width * itemsize % 16 == 0 else width


def threads_for(packs: int, packs_per_thread: int) -> int:
    wanted = -(-packs // packs_per_thread)
    return next((threads for threads in THREADS if threads >= wanted), THREADS[-1])


def clusters_for(x: ArraySpec, target: Target, each: int = PACKS) -> list[int]:
    """Clusters that take a row of which one block takes more than half at best, smallest first, at most three; none where packs
    are single elements. A thread has up to `each` packs."""
    packs, itemsize = packs_of(x), 4 if x.dtype == "float32" else 2
    if target.capability is None or target.capability < CLUSTERS_SINCE:
        return []
    if 2 * packs <= MOST or x.shape[-1] * itemsize % 16:
        return []
    return [size for size in CLUSTERS if packs <= size * each * THREADS[-1]][:3]


def is_narrow(x: ArraySpec) -> bool:
    return packs_of(x) < _SPARE


def cluster_config(x: ArraySpec, target: Target, *, rank: int = 1, beyond: int = MOST) -> ForwardConfig | None:
    """Of rows of more packs than that; None where there is no cluster for them. `rank`: 0 is the smallest cluster, 1 the next."""
    sizes = clusters_for(x, target) if packs_of(x) > beyond else []
    return ForwardConfig(THREADS[-1], sizes[min(rank, len(sizes) - 1)], _CLUSTER_STAGES) if sizes else None


def direct_clusters(x: ArraySpec, target: Target, *, whole: bool) -> list[ForwardConfig]:
    """Straight to registers, eight packs per thread: in front the smallest cluster of blocks of up to 256 threads, on an H200 the
    fastest. `whole`: only that whose 256 threads all have all of their packs."""
    packs, best = packs_of(x), MANY_PACKS * _DIRECT_CLUSTER_THREADS
    sizes = sorted(clusters_for(x, target, MANY_PACKS), key=lambda size: (packs > size * best, size))
    return [ForwardConfig(THREADS[-1], size, 0) for size in sizes if not whole or packs == size * best]


def block_config(x: ArraySpec, streams: int, packs_per_thread: int, stages: int | None = None) -> ForwardConfig:
    """Through shared memory, of kernels that read so many arrays."""
    return ForwardConfig(threads_for(packs_of(x), packs_per_thread), 1, stages or _STAGES[streams])


def direct_config(x: ArraySpec, packs_per_thread: int, most: int = MOST_DIRECT) -> ForwardConfig | None:
    """Without shared memory; None for rows that do not start on 16 bytes, or of more packs than that."""
    packs = packs_of(x)
    if packs == x.shape[-1] or packs > most:
        return None
    return ForwardConfig(max(threads_for(packs, packs_per_thread), WARP), 1, 0)


def row_configs(
    x: ArraySpec,
    target: Target,
    streams: int,
    chosen: ForwardConfig,
    *,
    registers: Literal["never", "also", "always"] = "also",
    most: int = PACKS,
) -> list[ForwardConfig]:
    """Their search space, the heuristic's choice in front; `registers`: whether rows of one block go straight to them, then `most`
    packs per thread."""
    packs, stages = packs_of(x), _STAGES[streams]
    more = (_CLUSTER_STAGES + 3,) if registers != "never" else ()
    sizes, counts = clusters_for(x, target), (_CLUSTER_STAGES, _CLUSTER_STAGES + 1, *more)
    found = [ForwardConfig(THREADS[-1], size, count) for count in counts for size in sizes]
    each = [items for items in (MANY_PACKS, PACKS, 2) if items <= most and registers != "never"]
    direct = [config for config in (direct_config(x, items, most * THREADS[-1]) for items in each) if config]
    if sizes and packs > MOST:
        found += direct
    else:
        counts = (stages + 2, stages) if registers != "never" else (stages, stages - 1, stages + 2)
        blocks = [ForwardConfig(threads_for(packs, items), 1, count) for count in counts for items in (PACKS, 2, 1)]
        found += direct if direct and registers == "always" else direct + blocks
    return list(dict.fromkeys([chosen, *found]))


def forward_heuristic(call: NormCall, target: Target) -> ForwardConfig:
    direct = direct_config(call.x, PACKS, 2 * MOST_DIRECT)
    if direct or is_narrow(call.x):
        return direct or block_config(call.x, 1, 2, 3)
    shared = direct_clusters(call.x, target, whole=True) if packs_of(call.x) <= _MOST_IN_CLUSTERS else []
    cluster = shared[0] if shared else cluster_config(call.x, target, rank=0)
    return cluster or block_config(call.x, 1, PACKS, 6)


def forward_space(call: NormCall, target: Target) -> list[ForwardConfig]:
    found = row_configs(call.x, target, 1, forward_heuristic(call, target), registers="always")
    return list(dict.fromkeys([*found, *direct_clusters(call.x, target, whole=True)]))


def centred_forward_heuristic(call: NormCall, target: Target) -> ForwardConfig:
    """With two parameters to read a row of many packs per thread has them from the second level of cache, which on an H200 keeps
    clusters back: where one block can take the row it is faster, beyond that rows in shared memory, of which four were best."""
    if packs_of(call.x) == MANY_PACKS * THREADS[-1]:
        return direct_config(call.x, MANY_PACKS, MANY_PACKS * THREADS[-1]) or forward_heuristic(call, target)
    direct = direct_config(call.x, PACKS, 2 * MOST_DIRECT)
    cluster = None if direct else cluster_config(call.x, target, rank=0)
    return dataclasses.replace(cluster, stages=_CLUSTER_STAGES + 1) if cluster else forward_heuristic(call, target)


def centred_forward_space(call: NormCall, target: Target) -> list[ForwardConfig]:
    return row_configs(call.x, target, 1, centred_forward_heuristic(call, target), registers="always")


def _summing(x: ArraySpec, config: ForwardConfig) -> BackwardConfig:
    """With as many parts as a device can run at once at most: threads with four packs take twice the registers."""
    packs = packs_of(x)
    threads = config.threads if config.cluster == 1 else threads_for(packs, PACKS * config.cluster)
    fitting = 640 if packs > 2 * threads * config.cluster else 1024
    blocks = max(1, fitting // max(threads, 256 if threads <= 32 else threads))
    return BackwardConfig(config.threads, max(1, _PROCESSORS * blocks // config.cluster), config.cluster, config.stages)


def _few_packs(x: ArraySpec, threads: int, packs_per_thread: int) -> ForwardConfig:
    """So many packs each for up to so many threads of a block, then up to four; one each of narrow rows. Two rows in shared memory;
    three where threads have four packs, so that fewer blocks fit on a processor."""
    packs = packs_of(x)
    threads = max(min(threads, threads_for(packs, 1 if is_narrow(x) else packs_per_thread)), threads_for(packs, PACKS))
    return ForwardConfig(threads, 1, 2 if packs <= 2 * threads else 3)


def _backward(call: NormCall, target: Target) -> ForwardConfig:
    """On an H200, over 4096 columns of bfloat16 256 threads of two packs were 1.04 times as fast as 512 of one. For rows that just
    fit a block, a cluster of four was 1.07 times as fast; of rows of twice that, one of eight 1.05 times as fast as of four."""
    cluster = cluster_config(call.x, target, rank=1 + (packs_of(call.x) > MOST), beyond=MOST // 2)
    return cluster or _few_packs(call.x, THREADS[-1] // 2, 2)


def backward_heuristic(call: NormCall, target: Target) -> BackwardConfig:
    return _summing(call.x, _backward(call, target))


def backward_space(call: NormCall, target: Target) -> list[BackwardConfig]:
    found = row_configs(call.x, target, 2, _backward(call, target), registers="never")
    return [_summing(call.x, config) for config in found]


def _centred_backward(call: NormCall, target: Target) -> ForwardConfig:
    """With two numbers to find of a row, on an H200 256 threads of two packs over 4096 columns of bfloat16 were 1.1 times as fast
    as 512 of one, over 1024 columns 64 of two 1.06 times as 128 of one; a block was as fast as a cluster for rows that just fit
    one. Of rows of twice that clusters of eight were the fastest."""
    return cluster_config(call.x, target, rank=2) or _few_packs(call.x, THREADS[-1] // 2, 2)


def centred_backward_heuristic(call: NormCall, target: Target) -> BackwardConfig:
    return _summing(call.x, _centred_backward(call, target))


def centred_backward_space(call: NormCall, target: Target) -> list[BackwardConfig]:
    found = row_configs(call.x, target, 2, _centred_backward(call, target), registers="never")
    return [_summing(call.x, config) for config in found]


def added_forward_heuristic(call: AddRmsNormCall, target: Target) -> ForwardConfig:
    """On an H200 rows in registers were 1.04 to 1.10 times as fast as in shared memory, and the smaller clusters 1.03 times as the
    larger ones."""
    direct = direct_config(call.x, PACKS)
    return direct or cluster_config(call.x, target, rank=0) or block_config(call.x, 2, 2)


def added_forward_space(call: AddRmsNormCall, target: Target) -> list[ForwardConfig]:
    return row_configs(call.x, target, 2, added_forward_heuristic(call, target))


def _added_backward(call: AddRmsNormCall, target: Target) -> ForwardConfig:
    return cluster_config(call.x, target, rank=0) or _few_packs(call.x, THREADS[-1], 1)


def added_backward_heuristic(call: AddRmsNormCall, target: Target) -> BackwardConfig:
    return _summing(call.x, _added_backward(call, target))


def added_backward_space(call: AddRmsNormCall, target: Target) -> list[BackwardConfig]:
    found = row_configs(call.x, target, 3, _added_backward(call, target), registers="never")
    return [_summing(call.x, config) for config in found]


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
CENTRED_FORWARD = ConfigSpace(ForwardConfig, centred_forward_heuristic, centred_forward_space)
CENTRED_BACKWARD = ConfigSpace(BackwardConfig, centred_backward_heuristic, centred_backward_space)
"""CENTRED: where a mean is taken from rows."""
ADDED_FORWARD = ConfigSpace(ForwardConfig, added_forward_heuristic, added_forward_space)
ADDED_BACKWARD = ConfigSpace(BackwardConfig, added_backward_heuristic, added_backward_space)
"""Where two arrays are added before: one more is read in each phase."""
