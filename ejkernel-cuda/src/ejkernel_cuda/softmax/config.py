"""Performance knobs of `softmax`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.softmax.interface import SoftmaxCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_cuda._rows.config import (
    MANY_PACKS,
    MOST,
    MOST_DIRECT,
    PACKS,
    THREADS,
    ForwardConfig,
    block_config,
    cluster_config,
    direct_clusters,
    direct_config,
    packs_of,
    row_configs,
)

_LARGER = 8192
"""Packs of the widest rows for which the second smallest cluster is best."""
_MANY = MANY_PACKS * THREADS[-1]
"""Packs of the widest rows that one block holds in registers."""
Config = ForwardConfig
"""Config of both phases: neither reduces over rows."""


def _most(call: SoftmaxCall) -> int:
    """Packs of a row per thread in registers: with a mask, or a scale that is not positive, a thread needs mask bits, too."""
    return MANY_PACKS if call.where is None and call.scale > 0 else PACKS


def forward_heuristic(call: SoftmaxCall, target: Target) -> Config:
    """On an H200, rows in registers were 1.05 to 1.19 times as fast as in shared memory of a block or cluster, and clusters of
    blocks of 256 threads 1.03 times as fast as one block of 512. Through shared memory, clusters of eight were the fastest for
    rows of 256 KB and of 128 KB, there 1.08 times as fast as four; below that, clusters of two."""
    direct = direct_config(call.x, PACKS)
    if direct is None and _most(call) == MANY_PACKS:
        shared = _direct_clusters(call, target) if packs_of(call.x) > _MANY // 2 else []
        direct = shared[0] if shared else direct_config(call.x, MANY_PACKS, _MANY)
    cluster = cluster_config(call.x, target, rank=int(_MANY < packs_of(call.x) <= _LARGER))
    return direct or cluster or block_config(call.x, 1, 2)


def _direct_clusters(call: SoftmaxCall, target: Target) -> list[Config]:
    return direct_clusters(call.x, target, whole=False) if _most(call) == MANY_PACKS else []


def forward_space(call: SoftmaxCall, target: Target) -> list[Config]:
    found = row_configs(call.x, target, 1, forward_heuristic(call, target), most=_most(call))
    return list(dict.fromkeys([*found, *_direct_clusters(call, target)]))


def backward_heuristic(call: SoftmaxCall, target: Target) -> Config:
    """On an H200, rows of 64 KB took 0.91 of the time with clusters of four instead of two, and rows of 256 KB 0.94 with eight
    instead of sixteen, each with one stage more than forward; rows of 32 KB took 0.97 with clusters of four and three stages more
    than a block."""
    cluster = cluster_config(call.x, target, rank=int(packs_of(call.x) <= _LARGER), beyond=MOST_DIRECT)
    if cluster is not None:
        return dataclasses.replace(cluster, num_stages=cluster.num_stages + (1 if packs_of(call.x) > MOST else 3))
    return direct_config(call.x, 2) or block_config(call.x, 2, 2)


def backward_space(call: SoftmaxCall, target: Target) -> list[Config]:
    return row_configs(call.x, target, 2, backward_heuristic(call, target))


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(Config, backward_heuristic, backward_space)
