"""Configs of `block_sparse_attention`: those of `flash_attention`, with tiles that divide the listed blocks.

Without lists of the caller, the tiles of each kernel are listed as they are.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from ejkernel.operations.block_sparse_attention.interface import BlockSparseAttentionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton.block_sparse_attention.problem import dense_call_of, divisor, walks_lists
from ejkernel_triton.flash_attention import config
from ejkernel_triton.flash_attention.config import BackwardConfig, ForwardConfig

_C = TypeVar("_C", ForwardConfig, BackwardConfig)


def _divided(call: BlockSparseAttentionCall, found: _C) -> _C:
    """A config with tiles that divide the listed blocks."""
    if not walks_lists(call):
        return found
    most = {"block_q": divisor(call.blocks[0]), "block_k": divisor(call.blocks[1])}
    names = [field.name for field in dataclasses.fields(found)]
    sizes = {name: min(getattr(found, name), most[suffix]) for name in names for suffix in most if name.endswith(suffix)}
    return dataclasses.replace(found, **sizes)


def forward_heuristic(call: BlockSparseAttentionCall, target: Target) -> ForwardConfig:
    found = config.forward_heuristic(dense_call_of(call), target)
    return _divided(call, dataclasses.replace(found, overlap=False, always_mask=False))


def forward_space(call: BlockSparseAttentionCall, target: Target) -> list[ForwardConfig]:
    found = config.forward_space(dense_call_of(call), target)
    found = [_divided(call, dataclasses.replace(each, overlap=False, always_mask=False)) for each in found]
    return list(dict.fromkeys([forward_heuristic(call, target), *found]))


def backward_heuristic(call: BlockSparseAttentionCall, target: Target) -> BackwardConfig:
    return _divided(call, config.backward_heuristic(dense_call_of(call), target))


def backward_space(call: BlockSparseAttentionCall, target: Target) -> list[BackwardConfig]:
    found = config.backward_space(dense_call_of(call), target)
    return list(dict.fromkeys([backward_heuristic(call, target), *(_divided(call, each) for each in found)]))


FORWARD = ConfigSpace(ForwardConfig, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(BackwardConfig, backward_heuristic, backward_space)
