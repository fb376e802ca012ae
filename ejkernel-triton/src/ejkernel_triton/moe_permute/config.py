"""Configs of `moe_permute`."""

from __future__ import annotations

import dataclasses

from ejkernel.operations.moe_permute.interface import MoePermuteCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._copies import config as copies


@dataclasses.dataclass(frozen=True)
class ForwardConfig(copies.Config):
    """Attributes:
    chunk: copies that one program counts and places.
    """

    chunk: int = 512


def forward_heuristic(call: MoePermuteCall, target: Target) -> ForwardConfig:
    moves = copies.heuristic(call.x.shape[0] * call.x.shape[1], call.x.shape[2], target)
    return ForwardConfig(moves.block, moves.num_warps)


def forward_space(call: MoePermuteCall, target: Target) -> list[ForwardConfig]:
    """Chunks are tried with the heuristic's moves."""
    first = forward_heuristic(call, target)
    moves = copies.space(call.x.shape[0] * call.x.shape[1], call.x.shape[2], target)
    chunks = [dataclasses.replace(first, chunk=chunk) for chunk in (256, 1024) if call.rows > 256]
    return list(dict.fromkeys([first, *(ForwardConfig(move.block, move.num_warps) for move in moves), *chunks]))


def backward_heuristic(call: MoePermuteCall, target: Target) -> copies.Config:
    return copies.heuristic(call.x.shape[0] * call.x.shape[1], call.x.shape[2], target)


def backward_space(call: MoePermuteCall, target: Target) -> list[copies.Config]:
    return copies.space(call.x.shape[0] * call.x.shape[1], call.x.shape[2], target)


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(copies.Config, backward_heuristic, backward_space)
