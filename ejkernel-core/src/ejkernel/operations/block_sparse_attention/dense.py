"""`block_sparse_attention` by kernels of `flash_attention`, of the masks that both know.

A platform lists what these functions make of its `flash_attention` as its `block_sparse_attention`; the default order of the one
is that of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ejkernel.operations.block_sparse_attention.interface import (
    BlockSparseAttentionCall,
    BlockSparseAttentionInputs,
    as_flash_attention,
    as_flash_call,
)
from ejkernel.operations.flash_attention.interface import FlashAttentionOutputs
from ejkernel.plugin import ConfigSpace, Target

__all__ = ["backward", "configs", "forward", "supports"]


def supports(flash_attention: Callable[[Any, Target], str | None]) -> Callable[[Any, Target], str | None]:
    """Which calls the kernel behind this `supports` runs."""

    def refusal(call: BlockSparseAttentionCall, target: Target) -> str | None:
        if call.mask_builder is not None:
            return "flash_attention, whose kernels these are, takes no mask_builder"
        if call.key_tiles is not None:
            return "flash_attention, whose kernels these are, takes no lists of tiles"
        return flash_attention(as_flash_call(call), target)

    return refusal


def configs(space: ConfigSpace) -> ConfigSpace:
    """The knobs of the kernel."""
    return ConfigSpace(
        space.config,
        lambda call, target: space.heuristic(as_flash_call(call), target),
        lambda call, target: space.search_space(as_flash_call(call), target),
    )


def forward(kernel: Callable[..., FlashAttentionOutputs]) -> Callable[..., FlashAttentionOutputs]:
    """`(call, inputs, config) -> outputs` of the kernel's forward."""
    return lambda call, inputs, config: kernel(*as_flash_attention(call, inputs), config)


def backward(kernel: Callable[..., Any]) -> Callable[..., BlockSparseAttentionInputs]:
    """`(call, inputs, outputs, cotangents, config) -> gradients` of the kernel's backward."""

    def gradients(
        call: BlockSparseAttentionCall,
        inputs: BlockSparseAttentionInputs,
        outputs: FlashAttentionOutputs,
        cotangents: FlashAttentionOutputs,
        config: Any,
    ) -> BlockSparseAttentionInputs:
        found = kernel(*as_flash_attention(call, inputs), outputs, cotangents, config)
        return BlockSparseAttentionInputs(found.query, found.key, found.value, bias=found.bias, softmax_aux=found.softmax_aux)

    return gradients
