"""Performance knobs of `softmax`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.softmax.interface import SoftmaxCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_cuda._rows.config import PACKS, ForwardConfig, block_config, cluster_config, direct_config, packs_of, row_configs

_LARGER = 8192
"""Packs of the widest rows that the larger clusters take in backward."""
Config = ForwardConfig
"""Of both phases: neither sums over rows."""


def forward_heuristic(call: SoftmaxCall, target: Target) -> Config:
    """On an H200 rows in registers were 1.06 to 1.19 times as fast as in shared memory, and the larger clusters 1.11 to 1.13 times
    as the smaller ones."""
    return direct_config(call.x, PACKS) or cluster_config(call.x, target) or block_config(call.x, 1, 2)


def forward_space(call: SoftmaxCall, target: Target) -> list[Config]:
    return row_configs(call.x, target, 1, forward_heuristic(call, target))


def backward_heuristic(call: SoftmaxCall, target: Target) -> Config:
    """On an H200, of rows of 64 KB clusters of four took 0.91 of the time of clusters of two, of rows of 256 KB clusters of eight
    0.94 of that of clusters of sixteen, each with a row more on its way than forward."""
    cluster = cluster_config(call.x, target, rank=int(packs_of(call.x) <= _LARGER))
    if cluster is not None:
        return dataclasses.replace(cluster, stages=cluster.stages + 1)
    return direct_config(call.x, 2) or block_config(call.x, 2, 2)


def backward_space(call: SoftmaxCall, target: Target) -> list[Config]:
    return row_configs(call.x, target, 2, backward_heuristic(call, target))


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(Config, backward_heuristic, backward_space)
