"""The default order of `block_sparse_attention`: that of `flash_attention`, whose kernels run the masks that both know."""

from __future__ import annotations

from collections.abc import Mapping

from ejkernel.call.order import Rule
from ejkernel.operations.block_sparse_attention.interface import BlockSparseAttentionCall, as_flash_call
from ejkernel.operations.common.order import Priority
from ejkernel.operations.flash_attention.order import ORDER as FLASH_ATTENTION
from ejkernel.plugin import Phase
from ejkernel.targets import Target


def _as_there(level: int | Rule) -> int | Rule:
    def rule(call: BlockSparseAttentionCall, phase: Phase, target: Target) -> Priority:
        return level(as_flash_call(call), phase, target) if callable(level) else Priority(level)

    return rule


ORDER: Mapping[str, Mapping[str, int | Rule]] = {
    backend: {implementation: _as_there(level) for implementation, level in levels.items()}
    for backend, levels in FLASH_ATTENTION.items()
}
