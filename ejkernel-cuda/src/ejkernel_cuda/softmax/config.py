"""Performance knobs of `softmax`."""

from __future__ import annotations

from ejkernel.operations.softmax.interface import SoftmaxCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_cuda._rows.config import ForwardConfig, row_config, row_configs

Config = ForwardConfig
"""Of both phases: neither sums over rows."""


def forward_heuristic(call: SoftmaxCall, target: Target) -> Config:
    return row_config(call.x, target, 1, 2)


def forward_space(call: SoftmaxCall, target: Target) -> list[Config]:
    return row_configs(call.x, target, 1, 2)


def backward_heuristic(call: SoftmaxCall, target: Target) -> Config:
    return row_config(call.x, target, 2, 2)


def backward_space(call: SoftmaxCall, target: Target) -> list[Config]:
    return row_configs(call.x, target, 2, 2)


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(Config, backward_heuristic, backward_space)
