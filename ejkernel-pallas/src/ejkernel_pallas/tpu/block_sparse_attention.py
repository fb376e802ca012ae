"""`block_sparse_attention` by the kernels of `flash_attention`, of the masks that both know."""

from __future__ import annotations

from ejkernel.operations.block_sparse_attention import dense
from ejkernel_pallas.tpu.flash_attention import capability, config, kernel

supports = dense.supports(capability.supports)
forward = dense.forward(kernel.forward)
backward = dense.backward(kernel.backward)
FORWARD = dense.configs(config.FORWARD)
BACKWARD = dense.configs(config.BACKWARD)
