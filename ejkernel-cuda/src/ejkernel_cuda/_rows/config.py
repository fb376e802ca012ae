"""Performance knobs of the row operations.

A thread holds up to four packs of 16 bytes of a row. A block either pipelines rows through shared memory with `cp.async`, so that
loads overlap reductions, or loads a few rows directly into registers and exits; some operations then have kernels with eight packs
per thread. From compute capability 9.0 on, a thread block cluster shares a row that is too wide for one block, in either way. Rows
that do not fit are read in several passes.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from ejkernel.call import ArraySpec
from ejkernel.operations.add_rms_norm.interface import AddRmsNormCall
from ejkernel.operations.common.rows.interface import NormCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.utils.renamed_knobs import renamed_knobs

THREADS = tuple(1 << power for power in range(10))
CLUSTERS = (2, 4, 8, 16)
CLUSTERS_SINCE = (9, 0)
PACKS = 4
WARP = 32
MOST = PACKS * THREADS[-1]
"""Packs of a row that one block holds."""
_STAGES = {1: 4, 2: 3, 3: 2}
"""By the number of input arrays: about 100 KB in flight per multiprocessor."""
_CLUSTER_STAGES = 3
MANY_PACKS = 8
"""Packs of a row per thread in register-only kernels: two blocks of 512 threads with 64 registers fit on a multiprocessor."""
MOST_DIRECT = 1024
"""Packs of the widest row that is loaded directly into registers; norms of one array take twice as many."""
_DIRECT_CLUSTER_THREADS = 256
_MOST_IN_CLUSTERS = 4 * MANY_PACKS * _DIRECT_CLUSTER_THREADS
"""Packs of the widest rows of norms that a cluster holds in registers; beyond, shared memory was 1.02 times as fast on an H200."""
_NARROW = 64
"""Rows of fewer packs are narrow."""
_MULTIPROCESSORS = 160
"""Upper bound for any device; the library launches no more blocks than are resident."""


@renamed_knobs(stages="num_stages")
@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Attributes:
    threads: threads of a block per row, a power of two up to 512. The library takes more if the row needs them, and fewer if some
        would hold no pack at four packs per thread (eight in register-only kernels that have so many).
    cluster: blocks that share a row, a power of two up to 16. Above 1, `threads` has no effect: a thread holds four packs, or eight
        in register-only kernels.
    num_stages: pipeline stages: rows of a block in shared memory, 1 to 8; fewer if shared memory is too small. A cluster has at
        least 2, one of them for the row whose statistics its blocks are still exchanging. 0: register-only; a thread loads up to
        four or eight packs of one row or of several, and its block exits. 0 means the minimum where rows are not aligned to 16
        bytes, and for clusters that `direct_clusters` does not list. Norms of one array are always register-only if their rows are
        aligned and fit one block.
    """

    threads: int
    cluster: int = 1
    num_stages: int = 4


@renamed_knobs(parts="partials", stages="num_stages")
@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Attributes:
    threads, cluster, num_stages: as in forward, but at least one stage.
    partials: upper bound on the partial sums of a parameter's gradient. One block or cluster writes each; no more are launched than
        are resident.
    """

    threads: int
    partials: int
    cluster: int = 1
    num_stages: int = 3


def packs_of(x: ArraySpec) -> int:
    """Vector accesses of one row: of 16 bytes if rows are aligned to 16 bytes, else of one element."""
    width, itemsize = x.shape[-1], 4 if x.dtype == "float32" else 2
    return -(-width * itemsize // 16) if width * itemsize % 16 == 0 else width


def threads_for(packs: int, packs_per_thread: int) -> int:
    wanted = -(-packs // packs_per_thread)
    return next((threads for threads in THREADS if threads >= wanted), THREADS[-1])


def clusters_for(x: ArraySpec, target: Target, each: int = PACKS) -> list[int]:
    """Cluster sizes for a row that fills more than half of a block, smallest first, at most three; none for unaligned rows. A
    thread holds up to `each` packs."""
    packs, itemsize = packs_of(x), 4 if x.dtype == "float32" else 2
    if target.capability is None or target.capability < CLUSTERS_SINCE:
        return []
    if 2 * packs <= MOST or x.shape[-1] * itemsize % 16:
        return []
    return [size for size in CLUSTERS if packs <= size * each * THREADS[-1]][:3]


def is_narrow(x: ArraySpec) -> bool:
    return packs_of(x) < _NARROW


def cluster_config(x: ArraySpec, target: Target, *, rank: int = 1, beyond: int = MOST) -> ForwardConfig | None:
    """For rows of more packs than `beyond`; None if no cluster fits. `rank`: 0 is the smallest cluster, 1 the next."""
    sizes = clusters_for(x, target) if packs_of(x) > beyond else []
    return ForwardConfig(THREADS[-1], sizes[min(rank, len(sizes) - 1)], _CLUSTER_STAGES) if sizes else None


def direct_clusters(x: ArraySpec, target: Target, *, whole: bool) -> list[ForwardConfig]:
    """Register-only clusters, eight packs per thread. The smallest cluster of blocks of up to 256 threads comes first; it was the
    fastest on an H200. `whole`: only the one whose 256 threads hold eight packs each."""
    packs, best = packs_of(x), MANY_PACKS * _DIRECT_CLUSTER_THREADS
    sizes = sorted(clusters_for(x, target, MANY_PACKS), key=lambda size: (packs > size * best, size))
    return [ForwardConfig(THREADS[-1], size, 0) for size in sizes if not whole or packs == size * best]


def block_config(x: ArraySpec, streams: int, packs_per_thread: int, stages: int | None = None) -> ForwardConfig:
    """Pipelined through shared memory; `streams` is the number of input arrays."""
    return ForwardConfig(threads_for(packs_of(x), packs_per_thread), 1, stages or _STAGES[streams])


def direct_config(x: ArraySpec, packs_per_thread: int, most: int = MOST_DIRECT) -> ForwardConfig | None:
    """Register-only; None for rows that are not aligned to 16 bytes, or have more packs than `most`."""
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
    """The search space, `chosen` first. `registers`: whether rows of one block are held in registers only; `most`: their packs per
    thread."""
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
    """A row of many packs per thread reads its two parameters from L2, which slows register-only clusters on an H200: one block is
    faster if it can hold the row; beyond that, rows in shared memory are, with four stages."""
    if packs_of(call.x) == MANY_PACKS * THREADS[-1]:
        return direct_config(call.x, MANY_PACKS, MANY_PACKS * THREADS[-1]) or forward_heuristic(call, target)
    direct = direct_config(call.x, PACKS, 2 * MOST_DIRECT)
    cluster = None if direct else cluster_config(call.x, target, rank=0)
    return dataclasses.replace(cluster, num_stages=_CLUSTER_STAGES + 1) if cluster else forward_heuristic(call, target)


def centred_forward_space(call: NormCall, target: Target) -> list[ForwardConfig]:
    return row_configs(call.x, target, 1, centred_forward_heuristic(call, target), registers="always")


def _summing(x: ArraySpec, config: ForwardConfig) -> BackwardConfig:
    """With at most as many partial sums as blocks are resident; threads with four packs take twice the registers."""
    packs = packs_of(x)
    threads = config.threads if config.cluster == 1 else threads_for(packs, PACKS * config.cluster)
    fitting = 640 if packs > 2 * threads * config.cluster else 1024
    blocks = max(1, fitting // max(threads, 256 if threads <= 32 else threads))
    return BackwardConfig(
        config.threads, max(1, _MULTIPROCESSORS * blocks // config.cluster), config.cluster, config.num_stages
    )


def _few_packs(x: ArraySpec, threads: int, packs_per_thread: int) -> ForwardConfig:
    """`packs_per_thread` packs for up to `threads` threads, then up to four; one for narrow rows. Two stages; three with four packs
    per thread, where fewer blocks fit on a multiprocessor."""
    packs = packs_of(x)
    threads = max(min(threads, threads_for(packs, 1 if is_narrow(x) else packs_per_thread)), threads_for(packs, PACKS))
    return ForwardConfig(threads, 1, 2 if packs <= 2 * threads else 3)


def _backward(call: NormCall, target: Target) -> ForwardConfig:
    """On an H200, for 4096 columns of bfloat16, 256 threads of two packs were 1.04 times as fast as 512 of one. For rows that just
    fit a block, a cluster of four was 1.07 times as fast; for rows twice as wide, eight were 1.05 times as fast as four."""
    cluster = cluster_config(call.x, target, rank=1 + (packs_of(call.x) > MOST), beyond=MOST // 2)
    return cluster or _few_packs(call.x, THREADS[-1] // 2, 2)


def backward_heuristic(call: NormCall, target: Target) -> BackwardConfig:
    return _summing(call.x, _backward(call, target))


def backward_space(call: NormCall, target: Target) -> list[BackwardConfig]:
    found = row_configs(call.x, target, 2, _backward(call, target), registers="never")
    return [_summing(call.x, config) for config in found]


def _centred_backward(call: NormCall, target: Target) -> ForwardConfig:
    """Two reductions per row. On an H200, 256 threads of two packs were 1.1 times as fast as 512 of one for 4096 columns of
    bfloat16, and 64 of two 1.06 times as fast as 128 of one for 1024 columns. For rows that just fit a block, a block was as fast
    as a cluster; for rows twice as wide, clusters of eight were the fastest."""
    return cluster_config(call.x, target, rank=2) or _few_packs(call.x, THREADS[-1] // 2, 2)


def centred_backward_heuristic(call: NormCall, target: Target) -> BackwardConfig:
    return _summing(call.x, _centred_backward(call, target))


def centred_backward_space(call: NormCall, target: Target) -> list[BackwardConfig]:
    found = row_configs(call.x, target, 2, _centred_backward(call, target), registers="never")
    return [_summing(call.x, config) for config in found]


def added_forward_heuristic(call: AddRmsNormCall, target: Target) -> ForwardConfig:
    """On an H200, rows in registers were 1.04 to 1.10 times as fast as in shared memory, and the smaller clusters 1.03 times as
    fast as the larger ones."""
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
"""CENTRED: layer_norm, which subtracts the mean of a row."""
ADDED_FORWARD = ConfigSpace(ForwardConfig, added_forward_heuristic, added_forward_space)
ADDED_BACKWARD = ConfigSpace(BackwardConfig, added_backward_heuristic, added_backward_space)
"""ADDED: add_rms_norm, which reads one more array in each phase."""
