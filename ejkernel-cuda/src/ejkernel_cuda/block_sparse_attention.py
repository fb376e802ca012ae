"""`block_sparse_attention` by the kernels of `flash_attention`, of the masks that both know."""

from __future__ import annotations

from ejkernel.operations.block_sparse_attention import dense
from ejkernel_cuda.flash_attention import capability, config, kernel

supports_forward = dense.supports(capability.supports_forward)
forward = dense.forward(kernel.forward)
FORWARD = dense.configs(config.FORWARD)
